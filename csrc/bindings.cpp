// The Python module aura._C. Addresses of buffers come in as integers: the tensors stay on Python's side.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include "token_loader.h"

#ifndef AURA_WITHOUT_TORCH
#include "cpu/kernels.h"
#include "cuda/kernels.h"

namespace aura {
void load_gpu_kernels(const cuda::Kernels* table);  // ops.cpp: for tensors on a GPU from now on
std::vector<std::string> cpu_isas();  // ops.cpp: the instruction sets this processor has kernels for, best first
}
#endif

namespace py = pybind11;
using aura::Fault;
using aura::Permutation;
using aura::WindowReader;

namespace {

// Found by searching the file, so that a module from other sources or for another torch is recognised before any of
// its code runs.
constexpr char kMark[] = "aura-source-hash:";
__attribute__((used)) const char kSourceHash[] = "aura-source-hash:" AURA_SOURCE_HASH;
__attribute__((used)) const char kTorchVersion[] = "aura-torch-version:" AURA_TORCH_VERSION;

// How long a wait may keep Ctrl+C unanswered.
constexpr int kSignalCheckMs = 100;

using Windows = py::array_t<uint64_t, py::array::c_style | py::array::forcecast>;

Windows permute(const Windows& n, uint64_t count, uint64_t seed, uint64_t epoch) {
  const Permutation order(count, seed, epoch);
  Windows result(n.size());
  const uint64_t* in = n.data();
  uint64_t* out = result.mutable_data();
  for (py::ssize_t i = 0; i < n.size(); ++i) {
    if (in[i] >= count) throw py::index_error("sequence number beyond the count");
    out[i] = order(in[i]);
  }
  return result;
}

std::unique_ptr<WindowReader> open_reader(const std::vector<std::pair<std::string, uint64_t>>& files,
                                          const std::vector<uintptr_t>& addresses, uint64_t header_bytes,
                                          uint64_t seq_len, uint64_t vocab_size, int file_width, int buffer_width) {
  std::vector<aura::Shard> shards;
  for (const auto& [path, tokens] : files) shards.push_back({path, tokens});
  std::vector<void*> buffers;
  for (uintptr_t address : addresses) buffers.push_back(reinterpret_cast<void*>(address));
  const WindowReader::Layout layout{header_bytes, seq_len, vocab_size, file_width, buffer_width};
  return std::make_unique<WindowReader>(shards, layout, buffers);
}

// None when the buffer holds its windows, else (kind, shard, position, token).
py::object wait_for(WindowReader& reader, size_t slot) {
  Fault fault;
  while (true) {
    bool ready;
    {
      const py::gil_scoped_release release;
      ready = reader.wait(slot, kSignalCheckMs, &fault);
    }
    if (ready) break;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }
  if (fault.kind == Fault::kNone) return py::none();
  const char* kind = fault.kind == Fault::kToken ? "token" : "shrunk";
  return py::make_tuple(kind, fault.shard, fault.position, fault.token);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The C++ side of aura: see aura/tokens.py for its meaning and its numpy equivalent.";
  m.attr("source_hash") = std::string(kSourceHash + sizeof(kMark) - 1);
#ifndef AURA_WITHOUT_TORCH
  m.def("cpu_isa", [] { return aura::kernels().name; });
  m.def("cpu_isas", &aura::cpu_isas);
  m.def("load_gpu_kernels",
        [](uintptr_t table) { aura::load_gpu_kernels(reinterpret_cast<const aura::cuda::Kernels*>(table)); });
#endif

  py::register_exception_translator([](std::exception_ptr error) {
    try {
      std::rethrow_exception(error);
    } catch (const std::system_error& e) {
      PyErr_SetObject(PyExc_OSError, py::make_tuple(e.code().value(), e.what()).ptr());
    }
  });

  m.def("permute", &permute, py::arg("n"), py::arg("count"), py::arg("seed"), py::arg("epoch"));

  using Release = py::call_guard<py::gil_scoped_release>;
  py::class_<WindowReader>(m, "WindowReader")
      .def(py::init(&open_reader), py::arg("files"), py::arg("addresses"), py::arg("header_bytes"),
           py::arg("seq_len"), py::arg("vocab_size"), py::arg("file_width"), py::arg("buffer_width"))
      .def_property_readonly("windows", &WindowReader::windows)
      .def("submit", py::overload_cast<size_t, uint64_t, uint64_t, uint64_t, uint64_t>(&WindowReader::submit),
           py::arg("slot"), py::arg("seed"), py::arg("epoch"), py::arg("first"), py::arg("count"))
      .def("submit_windows", py::overload_cast<size_t, std::vector<uint64_t>>(&WindowReader::submit),
           py::arg("slot"), py::arg("windows"))
      .def("wait", &wait_for, py::arg("slot"))
      .def("cancel", &WindowReader::cancel, Release())
      .def("close", &WindowReader::close, Release());
}
