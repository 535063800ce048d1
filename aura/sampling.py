"""Draw text from a language model, one token at a time, with a key-value cache."""

import torch

from aura.errors import UserError

UNFINISHED = "\ufffd"  # what a decoder gives for a character of which some bytes are still to come


@torch.no_grad()
def choose(logits, generator, temperature=1.0, top_k=0, top_p=1.0):
    """One token id from logits [vocab_size].

    temperature 0 takes the likeliest. top_k > 0 keeps that many (Fan et al. 2018); top_p < 1 keeps the smallest set
    whose probability reaches it (Holtzman et al. 2020). Raises UserError where there is no likeliest.
    """
    if not logits.max().isfinite():  # which is NaN where any is
        raise UserError("no se puede elegir ningún token: el modelo da valores que no son números finitos, porque el "
                        "entrenamiento divergió; use un punto de control anterior")
    if temperature == 0:
        return int(logits.argmax())
    logits = logits.double().cpu()
    logits = ((logits - logits.max()) / temperature).float()  # however small that is, the likeliest stays at 0
    if top_k:
        logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -torch.inf
    probabilities = logits.softmax(-1)
    if top_p < 1:
        ordered, order = probabilities.sort(descending=True)
        beyond = ordered.cumsum(-1) - ordered >= top_p
        beyond[0] = False  # even with a top_p that float32 takes for 0
        ordered[beyond] = 0
        probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
    return int(torch.multinomial(probabilities, 1, generator=generator))


@torch.no_grad()
def generate(model, prompt, length, *, eos_id=None, seed=0, pieces=None, stopped=None, **choice):
    """Yield the ids by which the token ids `prompt` (list of int) go on: at most `length`, and none from eos_id on.

    pieces: how many ids the tokenizer has, where the model may have more. stopped() -> whether to end at once. choice:
    temperature, top_k, top_p of `choose`. Of a prompt longer than the context only the end is seen. When the context is
    full, its older half is forgotten. The model is left in the mode it was in.
    """
    training = model.training
    model.eval()
    weight = next(model.parameters())
    context = model.config.seq_len
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt)
    cache, pending = model.empty_cache(), tokens[-context:]
    try:
        for _ in range(length):
            if stopped and stopped():
                break
            if cache.length + len(pending) > context:
                cache, pending = model.empty_cache(), tokens[-max(1, context // 2):]
            logits = model(torch.tensor([pending], device=weight.device), cache=cache)[0, -1, :pieces]
            token = choose(logits, generator, **choice)
            if token == eos_id:
                break
            tokens.append(token)
            pending = [token]
            yield token
    finally:
        model.train(training)


def write(model, tokenizer, prompt, length, *, say=None, **choice):
    """(the text `prompt` and how the model goes on with it, the number of new tokens); the rest as generate().

    say(part): is told the text while it is written, in parts.
    """
    ids = tokenizer.encode(prompt) or [tokenizer.eos_id]
    given = told = len(ids)  # told: of how many ids the text is in `parts`
    start, parts = 0, []

    def untold():
        # Together: a decoder may strip the space that a text begins with, and this one begins in the middle.
        known, whole = tokenizer.decode(ids[start:told]), tokenizer.decode(ids[start:])
        return whole[len(known):] if whole.startswith(known) else tokenizer.decode(ids[told:])

    def tell(part):
        parts.append(part)
        if say and part:
            say(part)

    tell(prompt)
    for token in generate(model, ids, length, eos_id=tokenizer.eos_id, pieces=tokenizer.vocab_size, **choice):
        ids.append(token)
        part = untold()
        if part and not part.endswith(UNFINISHED):
            tell(part)
            start, told = told, len(ids)
    tell(untold())
    return "".join(parts), len(ids) - given
