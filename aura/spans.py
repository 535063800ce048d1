"""Windows of a question and a part of its context, as BERT reads them, and the spans of text that answer it.

    found = features(examples, tokenizer)                  windows of 384 tokens with the answer's place
    answers, n_best = predict(examples, found, start_logits, end_logits)
"""

import unicodedata
from dataclasses import dataclass

import numpy as np

from aura.errors import UserError

UNKNOWN = -1  # where the answer begins and ends in a window, if there is none to compare with


@dataclass
class Features:
    """The windows of a list of examples: [CLS] question [SEP] part of the context [SEP].

    ids: int32 [tokens], window i is ids[offsets[i]:offsets[i + 1]]. offsets: int64 [windows + 1]. Then int32 [windows]:
    example: number of its example, never falling. context_at: position of its first context token; the token type is 0
    before it and 1 from there on. start, end: positions of the answer's first and last token, both 0, [CLS], where the
    answer is not whole inside, and UNKNOWN where there is none. [max_from, max_to): the positions of the tokens around
    which this window shows more context than any other.
    first_token: int64 [windows], number of its first context token in char_starts and char_ends: int32 [tokens of all
    distinct contexts], offsets of each into its context.
    """

    ids: np.ndarray
    offsets: np.ndarray
    example: np.ndarray
    context_at: np.ndarray
    start: np.ndarray
    end: np.ndarray
    max_from: np.ndarray
    max_to: np.ndarray
    first_token: np.ndarray
    char_starts: np.ndarray
    char_ends: np.ndarray

    def __len__(self):
        return len(self.example)

    @property
    def lengths(self):
        """Tokens of each window, int64 [windows]."""
        return np.diff(self.offsets)

    @property
    def asked(self):
        """Numbers of the windows whose question has no answer to compare with, int64."""
        return np.flatnonzero(self.start == UNKNOWN)


def features(examples, tokenizer, max_len=384, stride=128, question_len=64):
    """The Features of `examples` as BERT's run_squad makes them.

    max_len: tokens of a window at most. stride: tokens by which the next window of a long context begins later.
    question_len: tokens of a question at most, the rest is cut off. The answer's tokens are those that cover its
    characters. Raises UserError when windows would leave out parts of a context.
    """
    room = max_len - question_len - 3
    if not 1 <= stride <= room or question_len < 1:
        raise UserError(f"ventanas de {max_len} tokens cada {stride} con preguntas de hasta {question_len} dejarían "
                        f"contexto sin leer: el paso debe estar entre 1 y {max_len} - {question_len} - 3 = {room}")
    contexts, tokens = {}, 0
    for example in examples:
        if example.context not in contexts:
            contexts[example.context] = (tokens, *tokenizer.encode(example.context))
            tokens += len(contexts[example.context][1])
    cls, sep = (np.array([number], np.int32) for number in (tokenizer.cls_id, tokenizer.sep_id))
    pieces, rows = [], []
    for number, example in enumerate(examples):
        base, ids, starts, ends = contexts[example.context]
        question = tokenizer.encode(example.question)[0][:question_len]
        at, size = len(question) + 2, max_len - len(question) - 3
        answer = _answer_tokens(example.place(), starts, ends)
        firsts = range(0, max(1, len(ids) - size + stride), stride)
        for first, (low, high) in zip(firsts, _maximum_contexts(firsts, size, len(ids)), strict=True):
            part = ids[first:first + size]
            whole = answer and first <= answer[0] and answer[1] < first + size
            place = [at + token - first for token in answer] if whole else [0 if example.answers else UNKNOWN] * 2
            pieces += [cls, question, sep, part, sep]
            rows.append((number, at, *place, at + low, at + high, base + first, at + len(part) + 1))
    columns = np.array(rows, np.int64).reshape(-1, 8).T
    offsets = np.concatenate([[0], np.cumsum(columns[7])])
    known = [(starts, ends) for _, _, starts, ends in contexts.values()]
    return Features(_joined(pieces), offsets, *columns[:6].astype(np.int32), columns[6].copy(),
                    _joined([starts for starts, _ in known]), _joined([ends for _, ends in known]))


def _joined(arrays):
    return np.concatenate([np.zeros(0, np.int32), *arrays])


def _answer_tokens(place, starts, ends):
    """(first, last) of the context's tokens that cover the characters of `place`; None where there are none."""
    if place is None:
        return None
    first = int(np.searchsorted(ends, place[0], side="right"))
    last = int(np.searchsorted(starts, place[1], side="left")) - 1
    return (first, last) if first <= last else None


def _maximum_contexts(firsts, size, tokens):
    """For each window the [from, to), counted from its first token, of the tokens that no other window shows with more
    context around them.

    The context of a token is the smaller one of its two sides, plus a hundredth of the window's length, so that of two
    equal ones the longer window counts, or else the earlier. A window's own tokens are in one piece,
    since the difference between two windows' scores never rises from left to right.
    """
    if len(firsts) == 1:
        return [(0, tokens)]
    best, owner = np.full(tokens, -np.inf), np.zeros(tokens, np.int64)
    for number, first in enumerate(firsts):
        count = min(size, tokens - first)
        place = np.arange(count)
        score = np.minimum(place, count - 1 - place) + 0.01 * count
        better = score > best[first:first + count]
        best[first:first + count][better] = score[better]
        owner[first:first + count][better] = number
    bounds = np.searchsorted(owner, np.arange(len(firsts) + 1)).tolist()
    return [(low - first, high - first) for first, low, high in zip(firsts, bounds, bounds[1:], strict=False)]


# ---- Answers --------------------------------------------------------------------------------------------------------


def predict(examples, found, start_logits, end_logits, n_best=20, longest=30):
    """({id: answer}, {id: [{"text", "probability", "start_logit", "end_logit"}, best first]}) by run_squad's rules.

    found: the Features of `examples`. start_logits, end_logits: of each window those of its tokens, of any floating
    type, and perhaps more behind them.
    n_best: starts and ends looked at per window, and answers kept per question, each text once. longest: tokens of an
    answer at most.

    An answer starts in the window that shows most context around it, lies within the context, and is the one with the
    greatest sum of logits over all windows. The n_best are chosen among the context's tokens, so the question and the
    padding cannot push out an answer. The text is cut from the context by the tokens' offsets. The original has no
    offsets: it looks for the tokens' text in the words around, and gives whole words where the two do not align.
    """
    candidates = [[] for _ in examples]
    for window, number in enumerate(found.example):
        scores = [np.asarray(logits[window], np.float64) for logits in (start_logits, end_logits)]
        candidates[number].append((found.first_token[window], *_spans(found, window, *scores, n_best, longest)))
    lists = {example.id: _n_best(example, windows, found, n_best)
             for example, windows in zip(examples, candidates, strict=True)}
    return {name: answers[0]["text"] for name, answers in lists.items()}, lists


def _spans(found, window, start_logits, end_logits, n_best, longest):
    """(first tokens, last tokens, their logits, theirs) of a window's spans, counted from its first context token."""
    at = found.context_at[window]
    low, high = found.max_from[window], found.max_to[window]
    end = found.offsets[window + 1] - found.offsets[window] - 1
    first = low - at + np.argsort(-start_logits[low:high], kind="stable")[:n_best]
    last = np.argsort(-end_logits[at:end], kind="stable")[:n_best]
    sizes = last - first[:, None]
    finite = np.isfinite(start_logits[at + first])[:, None] & np.isfinite(end_logits[at + last])
    rows, columns = np.nonzero((sizes >= 0) & (sizes < longest) & finite)
    first, last = first[rows], last[columns]
    return first, last, start_logits[at + first], end_logits[at + last]


def _n_best(example, windows, found, n_best):
    """The best answers to one question over all its windows."""
    starts = np.concatenate([base + first for base, first, _, _, _ in windows] or [[]])
    ends = np.concatenate([base + last for base, _, last, _, _ in windows] or [[]])
    logits = [np.concatenate([window[k] for window in windows] or [[]]) for k in (3, 4)]
    answers = {}
    for k in np.argsort(-(logits[0] + logits[1]), kind="stable"):
        text = _text(example.context, found.char_starts[starts[k]], found.char_ends[ends[k]])
        if text not in answers:
            answers[text] = (float(logits[0][k]), float(logits[1][k]))
            if len(answers) == n_best:
                break
    answers = answers or {"": (0.0, 0.0)}
    scores = np.array([sum(pair) for pair in answers.values()])
    weights = np.exp(scores - scores.max())
    return [{"text": text, "probability": float(weight), "start_logit": pair[0], "end_logit": pair[1]}
            for (text, pair), weight in zip(answers.items(), weights / weights.sum(), strict=True)]


def _text(context, start, end):
    """A part of the context, with the marks that follow its last letter: a normalised token ends before them."""
    while end < len(context) and unicodedata.category(context[end]) == "Mn":
        end += 1
    return context[start:end]
