// The element types of the kernels whose tensors are all of one type.
#pragma once

namespace aura {
namespace cuda {

enum class Element { kFloat, kBFloat16, kHalf };

}  // namespace cuda
}  // namespace aura
