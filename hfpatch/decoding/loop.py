"""`generate` of one sequence after another without what transformers does again for each token.

transformers asks the GPU after every token whether all texts have ended, so that the host's time
and the GPU's add up. Here the answer for a token is read while the next step runs; if it was yes,
that one step is taken back: from the texts, the cache and the random numbers. On a CPU, where a
step would be lost, it is read at once. Preparation of inputs, the prompt's call, selection of
tokens and their order are transformers' own; greedy tokens that nobody looks at otherwise the steps
choose. Whatever is not of the plain kind goes to transformers' own loop, where each call of the
model may still be a step; the status says why (`_unfit_call`, `_Loop.unfit`). Where `generate`
itself asks for calls that are no steps, that is said here (`_without_steps`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import (
    GENERATION_MODES_MAPPING,
    GenerateDecoderOnlyOutput,
    GenerationMixin,
)

from hfpatch.decoding import cache as caches
from hfpatch.decoding.greedy import Chain, ends_of
from hfpatch.decoding.kept import decoders
from hfpatch.decoding.likeness import only_captures
from hfpatch.direct_calls import has_own_call
from hfpatch.proof.unchanged import calls_otherwise, is_bound, is_hooked

#: Where a step runs beside the host: the next one is launched before the answer for it is read.
AHEAD = frozenset({"cuda"})
#: Methods that the loop stands for or relies on: a class that has its own keeps its own loop.
_RELIED_ON = (
    *("generate", "_sample", "_prefill", "prepare_inputs_for_generation"),
    *("_update_model_kwargs_for_generation", "_has_unfinished_sequences"),
    "_optimize_model_for_decode",
)
#: What of transformers' own methods the loop calls by position; another release may have others.
_PREFILL = ["self", "input_ids", "generation_config", "model_kwargs"]
#: Settings that ask for another loop, and the values under which they do not.
_PLAIN_SETTINGS: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "cache_implementation": (None, "dynamic"),
} | dict.fromkeys(
    (
        *("penalty_alpha", "dola_layers", "constraints", "force_words_ids", "token_healing"),
        *("prompt_lookup_num_tokens", "assistant_early_exit", "speculation_type", "stop_strings"),
        *("custom_generate", "assistant_model", "tokenizer", "assistant_tokenizer", "synced_gpus"),
    ),
    (None, False),
)
#: Processors whose result depends on their arguments alone: one more call changes nothing.
_STATELESS = frozenset(
    getattr(logits_process, name)
    for name in (
        *("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"),
        *("TypicalLogitsWarper", "EpsilonLogitsWarper", "EtaLogitsWarper", "TopHLogitsWarper"),
        *("RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor"),
        *("MinLengthLogitsProcessor", "MinNewTokensLengthLogitsProcessor"),
        *("NoBadWordsLogitsProcessor", "SequenceBiasLogitsProcessor", "LogitNormalization"),
        *("SuppressTokensLogitsProcessor", "SuppressTokensAtBeginLogitsProcessor"),
        *("ForcedBOSTokenLogitsProcessor", "ForcedEOSTokenLogitsProcessor"),
        *("InfNanRemoveLogitsProcessor", "ExponentialDecayLengthPenalty"),
    )
    if hasattr(logits_process, name)
)
_ARGUMENTS = frozenset(
    {"attention_mask", "position_ids", caches.NAME, "use_cache", "logits_to_keep"}
)


def method_for(model: Any) -> Callable[..., Any] | None:
    """What stands as `generate` on a patched model; None where its class has one of its own."""
    cls = type(model)
    if getattr(cls, "generate", None) is not getattr(GenerationMixin, "generate", None):
        return None
    own = _own_loop_of(cls)

    @functools.wraps(cls.generate)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        decoder = decoders.get(self)
        if decoder is not None and (lost := _without_steps(self, args, kwargs)) is not None:
            decoder.generates_without(self, lost)
        why = own or _unfit_call(self, decoder, args, kwargs)
        if why is None:
            kwargs["custom_generate"] = _loop_for(kwargs.get("streamer"))
            return type(self).generate(self, *args, **kwargs)
        with _in_their_loop(self, why):
            return type(self).generate(self, *args, **kwargs)

    # What callers reach for to have gradients: theirs without its `no_grad`.
    setattr(generate, "__wrapped__", getattr(cls.generate, "__wrapped__", cls.generate))  # noqa: B010
    return generate


def _own_loop_of(cls: type) -> str | None:
    """Why texts of a class are written in its own loop; None where they need not be."""
    for name in _RELIED_ON:
        theirs = getattr(GenerationMixin, name, None)
        if theirs is None or getattr(cls, name, None) is not theirs:
            return f"`{cls.__name__}` has a `{name}` of its own"
    prefill: Any = getattr(GenerationMixin, "_prefill", None)
    if list(inspect.signature(prefill).parameters)[:4] != _PREFILL:
        return "this release of transformers has another `_prefill`"
    return None


@contextmanager
def _in_their_loop(model: Any, why: str) -> Iterator[None]:
    """Have the status say why a text was not written in this loop, if steps were made for it: where
    there were none, they are what the user misses, and their reasons are said already."""
    before = decoders.get(model)
    steps = 0 if before is None else before.steps
    try:
        yield
    finally:
        decoder = decoders.get(model)
        if decoder is not None and decoder.steps > steps:
            decoder.loop_reasons.setdefault(why)


def _loop_for(streamer: Any) -> Callable[..., Any]:
    """`_sample` with this streamer, which transformers drops where it is given a loop. It has no
    argument that transformers' own loop has not: such would be taken off those of `generate`."""

    def loop(self: Any, input_ids: Tensor, **model_kwargs: Any) -> Any:
        return _sample(self, input_ids, into=streamer, **model_kwargs)

    return loop


def _unfit_call(
    model: Any, decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """Why a call of `generate` cannot end in `_sample`, as far as its arguments say; None where it
    may."""
    if len(args) > 1:
        return "its arguments are given by position"
    if decoder is None:
        return "it was the first text of a copy"
    if decoder.refused is not None:
        return str(decoder.refused)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "`torch.distributed` is in use"
    given = (kwargs.get("generation_config"), model.generation_config)
    for name, plain in _PLAIN_SETTINGS.items():
        of_configs = () if name in kwargs else (getattr(c, name, None) for c in given)
        for value in (kwargs.get(name), *of_configs):
            if value not in plain:
                return _named(name, value)
    return None


def _named(name: str, value: Any) -> str:
    """A setting, with its value where that is short."""
    return f"`{name}` is {value!r}" if type(value) in (bool, int) else f"`{name}` is given"


def _without_steps(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why no call of the model will be a step, where those calls do not show it: there is no cache,
    or they are compiled."""
    given = args[1] if len(args) > 1 else kwargs.get("generation_config")

    def setting(name: str) -> Any:
        for value in (kwargs.get(name), getattr(given, name, None)):
            if value is not None:
                return value
        return getattr(model.generation_config, name, None)

    if setting("max_new_tokens") == 1:
        return None  # such a text has none
    if setting("use_cache") is False and kwargs.get("inputs_embeds") is None:
        return "`use_cache` is False"
    if setting("cache_implementation") in ("static", "offloaded_static"):
        return caches.other_kind(StaticCache)
    return None


def _sample(
    model: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    into: Any = None,
    **model_kwargs: Any,
) -> Any:
    """The loop: transformers' own where this one does not fit, with the streamer `into`."""
    mode = generation_config.get_generation_mode()
    plain = mode in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    decoder = decoders.get(model)  # none where a streamer, which has the prompt, restored the model
    if plain and decoder is not None:
        loop = _Loop(
            model, decoder, input_ids, logits_processor, stopping_criteria, generation_config, into
        )
        why = loop.unfit(model_kwargs)
        if why is None:
            return loop.run(model_kwargs)
    else:
        why = "it was restored" if plain else f"its mode is {mode.value}"
    method = "_sample" if plain else GENERATION_MODES_MAPPING[mode]
    with _in_their_loop(model, why):
        return getattr(type(model), method)(
            model,
            input_ids,
            logits_processor=logits_processor,
            stopping_criteria=stopping_criteria,
            generation_config=generation_config,
            streamer=into,
            **model_kwargs,
        )


class _Answer:
    """What is known of a token on its way to the host: whether each row is unfinished, and the
    tokens. One object serves one answer after another: it is sent again when it has been read."""

    def __init__(self, rows: int, device: torch.device, streamed: bool) -> None:
        cuda = device.type == "cuda"
        # not the default device, which may be any
        here: dict[str, Any] = {"pin_memory": cuda, "device": "cpu"}
        self._unfinished = torch.empty(rows, dtype=torch.bool, **here)
        self._tokens = torch.empty(rows, dtype=torch.int64, **here) if streamed else None
        self._event: Any = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]

    def send(self, unfinished: Tensor, tokens: Tensor) -> _Answer:
        """`unfinished`: of each row, bool."""
        self._unfinished.copy_(unfinished, non_blocking=True)
        if self._tokens is not None:
            self._tokens.copy_(tokens, non_blocking=True)
        if self._event is not None:
            # not the current device's stream: the model may lie on another
            self._event.record(torch.cuda.current_stream(unfinished.device))
        return self

    def read(self, text: _Text, streamer: Any) -> bool:
        """Whether all rows of `text` had ended; the token is given to the streamer."""
        if self._event is not None:
            self._event.synchronize()
        if streamer is not None and self._tokens is not None:
            streamer.put(self._tokens.clone())
        text.unfinished_rows = self._unfinished.tolist()
        return not any(text.unfinished_rows)


@dataclass
class _ChainedAnswer:
    """The tokens that a step has chosen. Whether a row has ended the host sees by them."""

    chain: Chain
    number: int  # of the step
    column: int  # where in the text they belong

    def read(self, text: _Text, streamer: Any) -> bool:
        """Whether all rows of `text` had ended; the token is given to the streamer."""
        tokens = self.chain.tokens_of(self.number)
        text.chosen[self.column] = tokens
        for row, token in enumerate(tokens):
            if token in text.end_tokens:
                text.unfinished_rows[row] = False
        if streamer is not None:
            streamer.put(torch.tensor(tokens, device="cpu"))
        return not any(text.unfinished_rows)


#: Columns that are made at once: of ids, masks and positions each token takes one.
_ROOM = 512


class _Columns:
    """A tensor `[rows, length]` that gets longer without a new one for each column.

    Args:
        first: as it is at the start.
        more: columns from one number on, so many of them; `first` has those before.
    """

    def __init__(self, first: Tensor, more: Callable[[int, int], Tensor]) -> None:
        self._whole, self._more, self.length = first, more, first.shape[1]

    def add(self) -> None:
        """One more column, the next of `more`."""
        made = self._whole.shape[1]
        if self.length == made:
            self._whole = torch.cat([self._whole, self._more(made, _ROOM)], dim=-1)
        self.length += 1

    def all(self) -> Tensor:
        """All columns, a view."""
        return self._whole[:, : self.length]

    def last(self) -> Tensor:
        """The last column, a view `[rows, 1]`."""
        return self._whole[:, self.length - 1 : self.length]


@dataclass
class _Loop:
    """One call of `generate`."""

    model: Any
    decoder: Any  # the model's, as it was when the loop began
    input_ids: Tensor
    processors: Any
    criteria: Any
    config: GenerationConfig
    streamer: Any

    def unfit(self, model_kwargs: dict[str, Any]) -> str | None:
        """Why this loop does not give what transformers' gives; None where it does."""
        model, config, ids = self.model, self.config, self.input_ids
        positions, mask = model_kwargs.get("position_ids"), model_kwargs.get("attention_mask")
        cache = model_kwargs.get(caches.NAME)
        if ids.device != model.device or ids.dim() != 2:
            return f"`input_ids` has {ids.dim()} dimensions on {ids.device}"
        if model.config.is_encoder_decoder:
            return "it has an encoder"
        if ids.dtype is not torch.int64:  # transformers' texts get wider with the first token
            return f"`input_ids` is {ids.dtype}"
        for name in model_kwargs:
            if name not in _ARGUMENTS:
                return f"`{name}` is given"
        if not model_kwargs.get("use_cache"):
            return "`use_cache` is False"
        if type(cache) is not DynamicCache:
            return caches.other_kind(type(cache))
        if positions is None or positions.dim() != 2 or (mask is not None and mask.dim() != 2):
            return "positions or mask have not two dimensions"
        for name in ("output_attentions", "output_hidden_states", "is_assistant"):
            if getattr(config, name):
                return f"`{name}` is set"
        if config._pad_token_tensor is None and any(
            hasattr(c, "eos_token_id") for c in self.criteria
        ):
            return "texts end, and there is no token to pad with"
        for name in _RELIED_ON:
            if name != "generate" and model.__dict__.get(name) is not None:
                return f"the model has a `{name}` of its own"
        kinds = (stopping_criteria.MaxLengthCriteria, stopping_criteria.EosTokenCriteria)
        for criterion in self.criteria:
            if type(criterion) not in kinds:
                return f"a criterion is a {type(criterion).__name__}"
        for processor in self.processors:
            if type(processor) not in _STATELESS:
                return f"a processor is a {type(processor).__name__}"
        return None

    def run(self, model_kwargs: dict[str, Any]) -> Any:
        """The texts, in the form that was asked for."""
        with ExitStack() as behind_the_prompt:
            return self._run(model_kwargs, behind_the_prompt)

    def _run(self, model_kwargs: dict[str, Any], behind_the_prompt: ExitStack) -> Any:
        model, config, ids = self.model, self.config, self.input_ids
        decoder = self.decoder
        decoder.loops += 1
        rows = ids.shape[0]
        text = _Text(self, ids)
        limits = [c for c in self.criteria if not hasattr(c, "eos_token_id")]
        random = _Random(ids.device) if config.do_sample else None
        output = model._prefill(ids, config, model_kwargs)
        # A prompt's experts are called as the user set it: what is chosen for steps copies the
        # weights of each token's experts.
        behind_the_prompt.enter_context(model._optimize_model_for_decode())
        cache = output.get(caches.NAME, model_kwargs[caches.NAME])
        mask: _Columns | None = None
        if (given := model_kwargs.get("attention_mask")) is not None:
            mask = _Columns(given, lambda _, count: given.new_ones((rows, count)))
        last = model_kwargs["position_ids"][:, -1:]
        positions = _Columns(
            last, lambda start, count: last + torch.arange(start, start + count, device=last.device)
        )
        rest: dict[str, Any] = {
            k: model_kwargs[k] for k in ("use_cache", "logits_to_keep") if k in model_kwargs
        }
        served, stepped = True, False  # stepped: the last call was an engine's step
        kept: Any = None  # the cache as it was, where a step may be another's
        before: _Answer | _ChainedAnswer | None = None  # to the token before the last
        chain: Chain | None = None  # where steps choose the tokens
        chosen = 0  # of its tokens, those of the text
        while True:
            if random is not None:
                random.keep()
            if chain is not None and chain.count > chosen:
                answer: _Answer | _ChainedAnswer | None = text.take(chain)
                score = output.logits[:, -1]
                chosen = chain.count
            else:
                if chain is not None:
                    text.leave(chain)
                    chain = None
                answer, score = text.add(output.logits)
            del output
            if before is not None:
                ended, arena = True, caches.held_arena(cache)
                # an error of the streamer takes the step back as well
                try:
                    ended = before.read(text, self.streamer)
                finally:
                    if ended:
                        text.drop()
                        caches.take_back(cache, arena, kept)
                        if random is not None:
                            random.take_back()
                if ended:
                    break
            reached = _reached(limits, text.columns, score)
            proven = (rows, 1) in decoder.trusted
            plain = served and proven and not reached
            ahead = plain and ids.device.type in AHEAD
            if not ahead and answer is not None and answer.read(text, self.streamer):
                break
            if reached:
                break
            before = answer if ahead else None
            kept = caches.layers_of(cache, stepped) if ahead else None
            positions.add()
            if mask is not None:
                mask.add()
                rest["attention_mask"] = mask.all()
            steps = decoder.steps
            if text.chains and plain and _calls_ours_alone(model):
                if chain is None:
                    chain, chosen = text.begin(decoder), 0
            elif chain is not None:
                text.leave(chain)
                chain = None
            output = model(
                input_ids=text.columns.last().contiguous() if chain is None else chain.ids,
                position_ids=positions.last(),
                return_dict=True,
                **{caches.NAME: cache},
                **rest,
            )
            # a model that trains with checkpoints returns none, and the next call gets this one
            cache = output.get(caches.NAME, cache)
            stepped = decoder.steps > steps
            served = stepped or not proven
        if self.streamer is not None:
            self.streamer.end()
        return text.result(cache)


class _Text:
    """The tokens so far of all rows, and what was asked for beside them.

    Attributes:
        columns: int64 `[rows, length]`; those of tokens that steps chose are set by `settle`.
        chains: whether steps may choose the tokens.
        chosen: what they chose, by column.
        unfinished_rows: of each row, as far as answers were read.
        end_tokens: that end a row.
    """

    def __init__(self, loop: _Loop, ids: Tensor) -> None:
        config: Any = loop.config
        rows, device = ids.shape[0], ids.device
        self.unfinished_rows = [True] * rows
        self.chosen: dict[int, list[int]] = {}
        self.columns = _Columns(ids, lambda _, count: ids.new_empty((rows, count)))
        self._loop, self._sampled = loop, config.do_sample
        self._returned = config.return_dict_in_generate
        self._scores: list[Tensor] | None = [] if self._returned and config.output_scores else None
        self._logits: list[Tensor] | None = [] if self._returned and config.output_logits else None
        # transformers chooses among numbers of fp32; the greatest is the same without
        kept = self._scores is not None or self._logits is not None
        self._copied = kept or self._sampled or bool(loop.processors)
        found = (getattr(c, "eos_token_id", None) for c in loop.criteria)
        self._ends = [end.to(device) for end in found if end is not None]
        pad = config._pad_token_tensor
        self._pad = None if pad is None else pad.to(device)
        self.chains = not self._copied
        self.end_tokens: frozenset[int] = frozenset()
        if self.chains:  # before the prompt's call: a GPU that is asked is idle
            tokens = [end.view(-1).tolist() for end in self._ends]
            self.end_tokens = frozenset(itertools.chain.from_iterable(tokens))
            self._chain_ends = ends_of(
                sorted(self.end_tokens), None if pad is None else int(pad), rows
            )
        self._alone = rows == 1
        self._unfinished = torch.ones(rows, dtype=torch.bool, device=device)
        streamed = loop.streamer is not None
        # two in turns: one is read when the next has been sent
        count = 2 if self._ends or streamed else 0
        self._answers = [_Answer(rows, device, streamed) for _ in range(count)]

    def add(self, logits: Tensor) -> tuple[_Answer | None, Tensor]:
        """Choose each row's next token, as transformers does.

        Returns:
            what will say whether all texts have ended; None where nobody asks. The scores.
        """
        chosen = logits[:, -1]
        if self._copied or chosen.device != self._unfinished.device:
            chosen = chosen.to(copy=True, dtype=torch.float32, device=self._unfinished.device)
        score = chosen
        if self._loop.processors:
            ids = self.columns.all().contiguous()
            for processor in self._loop.processors:  # the list itself reads each one's signature
                score = processor(ids, score)
        if self._scores is not None:
            self._scores.append(score)
        if self._logits is not None:
            self._logits.append(chosen)
        self.columns.add()
        column = self.columns.last()
        if self._sampled:
            tokens = torch.multinomial(nn.functional.softmax(score, dim=-1), 1).squeeze(1)
        elif self._alone:
            tokens = torch.argmax(score, dim=-1, keepdim=True, out=column)[:, 0]
        else:
            tokens = torch.argmax(score, dim=-1)
        # one text goes on until it ends: there is no padding behind it, and nothing to add up
        if self._ends and self._pad is not None and not self._alone:
            tokens = torch.where(self._unfinished, tokens, self._pad)
        if self._sampled or not self._alone:
            column.copy_(tokens[:, None])
        unfinished = None if self._alone else self._unfinished
        for end in self._ends:
            other = tokens != end if end.numel() == 1 else (tokens[:, None] != end).all(-1)
            unfinished = other if unfinished is None else unfinished & other
        if unfinished is not None:
            self._unfinished = unfinished
        if not self._answers:
            return None, score
        self._answers.reverse()
        return self._answers[0].send(self._unfinished, tokens), score

    def begin(self, decoder: Any) -> Chain:
        """From here on steps choose the tokens."""
        chain: Chain = decoder.chains.begin(self.columns.last(), self._unfinished, self._chain_ends)
        return chain

    def take(self, chain: Chain) -> _ChainedAnswer:
        """Each row's next token, which the last step has chosen.

        Returns:
            what will say which they are, and whether all texts have ended.
        """
        self.columns.add()
        return _ChainedAnswer(chain, chain.count, self.columns.length - 1)

    def leave(self, chain: Chain) -> None:
        """From here on no step chooses a token."""
        self.chains = False
        self.columns.last().copy_(chain.ids)  # what the host has not read yet
        if chain.unfinished is not None:
            self._unfinished = chain.unfinished.clone()  # the chain's memory is another's later

    def settle(self) -> None:
        """Put the tokens that steps chose into their columns."""
        if self.chosen:
            ids = self.columns.all()
            where = torch.tensor(list(self.chosen), device=ids.device)
            ids[:, where] = torch.tensor(list(self.chosen.values()), device=ids.device).T
            self.chosen = {}

    def drop(self) -> None:
        """Take the last token back."""
        self.columns.length -= 1
        for kept in (self._scores, self._logits):
            if kept is not None:
                kept.pop()

    def result(self, cache: Any) -> Any:
        """In the form that was asked for."""
        self.settle()
        ids = self.columns.all().clone(memory_format=torch.contiguous_format)
        if not self._returned:
            return ids
        return GenerateDecoderOnlyOutput(
            sequences=ids,
            scores=None if self._scores is None else tuple(self._scores),
            logits=None if self._logits is None else tuple(self._logits),
            **{caches.NAME: cache},
        )


def _calls_ours_alone(model: Any) -> bool:
    """Whether nobody else sees what a call of the model is given and returns: with a chain both
    are written to again."""
    forward = model.__dict__.get("forward")
    return (
        forward is not None
        and is_bound(model, forward)
        and not (is_hooked(model) and not only_captures(model))
        and not has_own_call(model.__dict__)
        and not calls_otherwise(type(model))
    )


def _reached(limits: list[Any], ids: _Columns, score: Tensor) -> bool:
    """Whether a text is as long as it may be. The lengths are known without asking the GPU."""
    for limit in limits:
        most = limit.max_position_embeddings
        if most is not None and ids.length >= most:
            limit(ids.all(), score)  # it warns of that once
    return any(ids.length >= limit.max_length for limit in limits)


class _Random:
    """The random numbers of a device's default generator, to be drawn once more."""

    def __init__(self, device: torch.device) -> None:
        self._state: Any = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._generator = torch.cuda.default_generators[index]
        else:
            self._generator = torch.default_generator

    def keep(self) -> None:
        """Remember where it stands."""
        cuda = self._generator.device.type == "cuda"
        self._state = self._generator.get_offset() if cuda else self._generator.get_state()

    def take_back(self) -> None:
        """Go back there."""
        if isinstance(self._state, int):
            self._generator.set_offset(self._state)
        else:
            self._generator.set_state(self._state)
