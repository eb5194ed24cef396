"""A model's forward where a call is a decoding step: one engine call; everything else goes to the
forward that was there.

Before an engine's result is used, the original runs beside it once; where they differ by more than
the dtype allows the model is left alone, and a warning says so.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules import module as module_calls

from hfpatch import forks
from hfpatch.announce import announce_in_call
from hfpatch.decoding import cache as caches
from hfpatch.decoding import prompt as prompts
from hfpatch.decoding import turn as turns
from hfpatch.decoding.greedy import Chain, Chains
from hfpatch.decoding.kept import Choice, decoders
from hfpatch.decoding.layer import Described, describe
from hfpatch.decoding.quantized import Samples, eight_bits, weights_of
from hfpatch.decoding.replica import text_config
from hfpatch.decoding.rules import Unexplained
from hfpatch.decoding.watch import Watch
from hfpatch.errors import DecodingError
from hfpatch.graphs.captures import Pool
from hfpatch.graphs.keys import NotCapturable
from hfpatch.per_object import PerObject
from hfpatch.proof.subject import Forward, watched
from hfpatch.proof.unchanged import calls_otherwise
from hfpatch.regions.deferred import nothing_captured

#: Sequences that an engine is made for, by device. On a GPU the products of more than 16 are
#: cuBLASLt's.
MOST_ROWS = {"cuda": 128, "cpu": 16}
#: New tokens of each, in a step.
MOST_TOKENS = 8
#: Where short prompts are graphs; elsewhere there is nothing to gain.
PROMPT_DEVICES = frozenset({"cuda"})
#: Where more tokens than those of a step, behind a cache, are computed by the description.
TURN_DEVICES = frozenset({"cpu", "cuda"})
#: Where they are launched before the model is looked at: a GPU has its work meanwhile.
LATE_DEVICES = frozenset({"cuda"})
#: Prompts' graphs that are kept.
_MOST_PROMPTS = 12
#: Keys and values of new tokens, by layer.
_Written = dict[str, list[Tensor]]
#: How far the first step may be from the original's, in epsilons of the dtype times the root of
#: the number of layers; relative to the root of the sum of squares.
_LIMITS = {torch.float32: 256.0, torch.float16: 8.0, torch.bfloat16: 8.0}
#: The same, relative, with weights of 8 bits, which somebody asked for: far above what they cost (a
#: few hundredths), and far below what a mistake would.
_BYTES_LIMIT = 0.2
#: Arguments of a call that a step serves where they are as `generate` gives them.
_TAKEN = frozenset(
    {
        *("input_ids", "attention_mask", "position_ids", *caches.NAMES, "use_cache"),
        *("logits_to_keep", "return_dict"),
    }
)
#: Of these, those that a step serves where they are on, or not given.
_SWITCHES = ("use_cache", "return_dict")


@dataclass
class _Step:
    """A call that an engine can serve: a step, a prompt, or a turn behind a cache."""

    ids: Tensor
    positions: Tensor | None
    mask: Tensor | None
    cache: Any
    all_logits: bool


#: What a decoder knows of a model with the settings that it has, and what is made of that.
_OF_SETTINGS = (
    *("described", "watch", "unlike", "engines", "trusted", "prompts", "trusted_prompts", "pool"),
    *("turns", "trusted_turns", "_bytes", "_copied"),
)
#: Looks at settings that stay as they are, behind which nobody waits for those before.
_MOST_LOOKS = 100
#: Engines of a model, one for each number of rows and tokens: a graph with its buffers of logits.
_MOST_ENGINES = 8


class Decoder:
    """One model's engines, and whether they may be used."""

    def __init__(self, described: Described | str, model: nn.Module, choice: Choice) -> None:
        self.choice = choice
        #: Why it is left alone for good.
        self.refused = described if isinstance(described, str) else None
        self._announced = False  # that it is
        #: Its description, whose tensors are forgotten where it is none of the model as it is.
        self.described: Any = described
        self.watch: Any = None if self.refused is not None else Watch(model)
        self.engines: dict[tuple[int, int], Any] = {}
        self.trusted: set[tuple[int, int]] = set()
        self.reasons: dict[str, None] = {}  # why calls went to the original
        self.loop_reasons: dict[str, None] = {}  # why steps were those of transformers' loop
        self.prompts: dict[tuple[int, int, bool], Any] = {}  # by rows, length and whether masked
        self.trusted_prompts: set[tuple[int, int, bool]] = set()
        self.prompts_refused: str | None = None
        self.prompts_served = 0
        self.pool: Any = None  # of the prompts' graphs
        self.turns: Any = None  # what computes turns behind a cache
        #: By rows, whether masked, and whether a window was shorter than the text.
        self.trusted_turns: set[tuple[int, bool, bool]] = set()
        self.turns_refused: str | None = None
        self.turns_served = 0
        self.turn_reasons: dict[str, None] = {}  # why turns went to the original
        self._bytes: Any = None  # the description with weights of 8 bits
        self._copied: Samples | None = None  # what those are copies of
        self.unlike: str | None = None  # why the model as it is now has no description
        self.steps = 0
        self.loops = 0  # calls of `generate` that did not wait for the GPU after every token
        self.chains = Chains()  # the greedy texts whose tokens the steps choose
        self.stream: Any = None  # of the last step
        #: What was known of the model when it had other settings (`_OF_SETTINGS`).
        self._aside: dict[str, Any] | None = None
        self._looks = 0  # since that was put aside
        self._due = True  # settings must be looked at: a new sequence
        self._cache: weakref.ref[Any] | None = None  # of the last step
        self._lock = forks.lock()

    # --- which calls -------------------------------------------------------------------------

    def run(self, model: nn.Module, original: Forward, args: Any, kwargs: Any) -> Any:
        """The result of a call: an engine's where one may serve, else the original's."""
        step = self._as_step(model, args, kwargs)
        if step is None:
            self._due = True
            return original(model, *args, **kwargs)
        with self._lock:  # engines have one workspace
            if self._cache is None or self._cache() is not step.cache:
                self._due = True
                # an object of somebody's own may be one that nothing refers to weakly
                plain = caches.is_plain(step.cache)
                self._cache = weakref.ref(step.cache) if plain else None
            if caches.is_empty(step.cache):
                outcome = self._serve_prompt(model, original, step, args, kwargs)
            elif step.ids.shape[1] > MOST_TOKENS:
                outcome = self._serve_turn(model, original, step, args, kwargs)
            else:
                outcome = self._serve(model, original, step, args, kwargs)
            if outcome is None:  # a prompt, perhaps
                self._due = True
        return original(model, *args, **kwargs) if outcome is None else outcome

    def _as_step(self, model: nn.Module, args: Any, kwargs: Any) -> _Step | None:
        """The call, if it is of the form of a decoding step; all of it is looked at."""
        cache = caches.given(kwargs)
        if cache is None or (self.refused is not None and self._announced):
            return None
        ids = args[0] if len(args) == 1 else kwargs.get("input_ids")
        if len(args) > 1:
            found: _Step | str | None = "its arguments are given by position"
        else:
            found = self.refused or self._read(model, ids, cache, kwargs)
        if isinstance(found, str):
            self._tell(model, found, ids, cache, kwargs)
            return None
        return found

    def _tell(self, model: nn.Module, why: str, ids: Any, cache: Any, kwargs: Any) -> None:
        """Say why a call is no step, where a text goes on by it."""
        if model.training and torch.is_grad_enabled():
            return  # nobody generates
        if not caches.is_plain(cache):  # how long it is a GPU may have to be asked
            if self.refused is None:
                self._say(model, caches.other_kind(type(cache)))
            return
        if caches.is_empty(cache):
            return
        new = kwargs.get("inputs_embeds") if ids is None else ids
        tokens = new.shape[1] if isinstance(new, Tensor) and new.dim() > 1 else 1
        if not tokens:
            return
        # `generate` asks for the logits of all candidates, and of what is behind a cache for one
        keep = kwargs.get("logits_to_keep")
        candidates = type(keep) is int and 1 < keep == tokens
        if tokens > MOST_TOKENS and not candidates:
            self.turn_reasons.setdefault(f"{why} behind a cache" if why in _TOO_MANY else why)
        elif why is self.refused:
            self._announce_refused(model)
        else:
            self._say(model, f"{why} at once, as candidates are" if why in _TOO_MANY else why)

    def _read(self, model: nn.Module, ids: Any, cache: Any, kwargs: Any) -> _Step | str | None:
        """The step that a call asks for, or why it is none that an engine serves; None where there
        is nothing to compute."""
        if torch.is_grad_enabled():
            return "gradients are on; call it under `torch.no_grad()`"
        if type(ids) is not Tensor:
            return "`input_ids` is not given" if ids is None else "`input_ids` is no plain tensor"
        if ids.dim() != 2 or ids.dtype != torch.int64:
            return f"`input_ids` is {ids.dtype} of {ids.dim()} dimensions"
        if ids.shape[1] > MOST_TOKENS:
            if caches.is_empty(cache):
                may_be = self._may_be_prompt(ids, cache, kwargs)
            else:
                may_be = caches.is_plain(cache) and self._may_be_turn(ids)
            if not may_be:
                return _TOO_MANY[self._has_turns(ids)]
        if not ids.numel():
            return None
        if model.training:
            return "it is in training mode; call `model.eval()`"
        most = MOST_ROWS.get(ids.device.type, 0)
        if ids.shape[0] > most:
            return f"more than {most} rows"
        beside = self.described.proof.beside
        for name, value in kwargs.items():
            if name in _TAKEN or name in beside or _says_nothing(value):
                continue
            if name != "tokenizer" or not self._is_only_handed_on(value):
                return f"`{name}` is given"
        for name in _SWITCHES:
            if kwargs.get(name) is not None and kwargs[name] is not True:
                return f"`{name}` is {kwargs[name]}"
        keep = kwargs.get("logits_to_keep", 0)
        if type(keep) is not int or not (keep == 0 or keep == 1 or keep >= ids.shape[1]):
            # without the number: who scores answers asks for another one at each call
            return "`logits_to_keep` is neither 0, 1 nor all of the new tokens"
        if ids.device.type not in self.choice.devices:
            return f"`decoding=` leaves out {ids.device.type}"
        if watched() or _modes() or _every_module_hooked() or calls_otherwise(nn.Module):
            return "somebody looks at every operator, or at every module's call"
        if torch.is_autocast_enabled(ids.device.type):
            return "autocast is on"
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        for name, t in (("attention_mask", mask), ("position_ids", positions)):
            if t is not None and (type(t) is not Tensor or t.device != ids.device):
                return f"`{name}` is no tensor on {ids.device}"
        if mask is not None and mask.dim() != 2:
            return f"`attention_mask` has {mask.dim()} dimensions"
        if not self._takes_positions(positions, ids):
            return "`position_ids` are of a form that no step was proven of"
        if positions is not None and positions.dim() == 3:
            positions = positions[-1]
        if not self._within_limit(ids, positions, cache):
            return "RoPE becomes another at this length"
        if mask is not None and (mask.is_floating_point() or mask.shape[0] != ids.shape[0]):
            return f"`attention_mask` is of other rows, or {mask.dtype}"
        config: Any = model.config
        if getattr(text_config(config), "output_router_logits", False):
            return "`output_router_logits` is set"
        if config.output_hidden_states or config.output_attentions or not config.return_dict:
            return "the config asks for hidden states, attentions or a tuple"
        return _Step(ids, positions, mask, cache, keep != 1)

    def _misfit(self, ids: Tensor) -> str | None:
        """Why the engines do not take these ids; of a model as it is described."""
        like = self.described.model.embedding
        if ids.device != like.device:
            return f"`input_ids` is on {ids.device}, the weights on {like.device}"
        if not ids.is_cuda and not 0 <= int(ids.min()) <= int(ids.max()) < like.shape[0]:
            return _UNKNOWN_ID  # the original says which
        return None

    def _is_only_handed_on(self, tokenizer: Any) -> bool:
        """Whether `generate` gives the tokenizer of its `stop_strings` to a forward that has no
        argument for it."""
        from transformers import PreTrainedTokenizerBase

        return isinstance(tokenizer, PreTrainedTokenizerBase) and not self.described.proof.tokenizer

    def _may_be_prompt(self, ids: Tensor, cache: Any, kwargs: Any) -> bool:
        """Whether more tokens than those of a step begin a sequence as `generate` does."""
        return (
            self.prompts_refused is None
            and ids.device.type in PROMPT_DEVICES
            and kwargs.get("logits_to_keep") == 1
            and prompts.bucket_for(*ids.shape) is not None
            and ((model := self.described.model) is None or _takes_prompts(model, ids, cache))
        )

    def _has_turns(self, ids: Tensor) -> bool:
        """Whether turns behind a cache are served there."""
        described = self.described.model
        return (
            self.turns_refused is None
            and ids.device.type in TURN_DEVICES
            and (described is None or _is_computed(described))
        )

    def _may_be_turn(self, ids: Tensor) -> bool:
        """Whether more tokens than those of a step, behind a cache, are no more than are served."""
        return self._has_turns(ids) and turns.is_short(*ids.shape)

    def _takes_positions(self, positions: Tensor | None, ids: Tensor) -> bool:
        """Whether positions are of a form that steps were proven of."""
        proof = self.described.proof
        if positions is None:
            return bool(proof.by_default)
        if positions.dtype != torch.int64 or positions.dim() not in (2, 3):
            return False
        axes = 0 if positions.dim() == 2 else positions.shape[0]
        rows, tokens = positions.shape[-2:]
        if axes not in proof.axes or tokens != ids.shape[1] or rows not in (1, ids.shape[0]):
            return False
        # An image's places have several numbers, a text's have one: a GPU is asked, as
        # transformers' loop asks after each token.
        return axes < 2 or bool((positions[-3:-1] == positions[-1:]).all())

    def _within_limit(self, ids: Tensor, positions: Tensor | None, cache: Any) -> bool:
        """Whether a sequence is shorter than where RoPE becomes another. A GPU is asked."""
        limit = self.described.limit
        if limit is None or not caches.is_plain(cache):  # another kind is refused later
            return True
        end = int(cache.get_seq_length()) + ids.shape[1]
        return end < limit and (positions is None or int(positions.max()) + 1 < limit)

    # --- a prompt ----------------------------------------------------------------------------

    def _serve_prompt(
        self, model: nn.Module, original: Forward, step: _Step, args: Any, kwargs: Any
    ) -> Any:
        """A prompt's result: a graph's, or the original's beside which that was proven; None:
        neither ran."""
        self._due = True
        if step.all_logits or not self._may_be_prompt(step.ids, step.cache, kwargs):
            return None
        rows, tokens = step.ids.shape
        mask = step.mask
        if mask is not None and mask.shape[1] != tokens:
            return None
        if mask is not None and bool(mask.all()):  # nothing was queued yet that a GPU waits for
            mask = None
        if mask is not None and not bool(mask[:, -1].all()):
            return None  # padded on the right: what follows is read off a token that is padding
        length = prompts.bucket_for(rows, tokens)
        assert length is not None
        key = (rows, length, mask is not None)
        # as in a step: a GPU gets its work first, where what it reads is in place
        late = key in self.trusted_prompts and self.unlike is None and self.watch.in_place()
        if not late and not (
            self._is_current(model)
            # it may be another model by now
            and self._may_be_prompt(step.ids, step.cache, kwargs)
        ):
            return None
        positions = step.positions
        if positions is None:
            positions = torch.arange(tokens, device=step.ids.device).unsqueeze(0)
        described = self.described.model
        try:
            with _after_the_last(self, step.ids):
                engine = self._prompt_engine(key)
                logits, kept = engine.run(step.ids, positions, mask)
                logits = logits.clone()
        except (RuntimeError, DecodingError, NotCapturable) as e:  # also: out of memory
            self._refuse_prompts(model, f"{type(e).__name__}: {e}")
            return None
        if late:
            if not self._is_current(model):
                return None
            if self.described.model is not described:  # it is another model by now
                return self._serve_prompt(model, original, step, args, kwargs)
        try:
            if key in self.trusted_prompts:
                arena = caches.begin(step.cache, kept, described)
                arena.found_fit(described)
                self.prompts_served += 1
                return self._result(logits, step.cache)
            ours = [t.clone() for t in kept.each()]
        except RuntimeError as e:  # out of memory
            self._refuse_prompts(model, f"{type(e).__name__}: {e}")
            return None
        with nothing_captured():  # it is not called for such prompts again
            output = original(model, *args, **kwargs)
        self._due = True
        if not self._is_as_returned(output):
            self._refuse_prompts(model, f"it returns a {type(output).__name__} of {sorted(output)}")
            return output
        pairs = [("logits", logits, output.logits[:, -1:])]
        seen = None if mask is None else mask.bool()[:, None, :, None]
        layers = output[caches.NAME].layers
        keys, values = ours[: len(layers)], ours[len(layers) :]
        for index, held in enumerate(layers):
            for name, of_all in (("keys", keys), ("values", values)):
                theirs = getattr(held, name)
                mine = of_all[index][:, :, tokens - theirs.shape[2] :]
                if seen is not None:  # nobody sees what padding has
                    there = seen[:, :, tokens - theirs.shape[2] :]
                    mine, theirs = (t.masked_fill(~there, 0) for t in (mine, theirs))
                pairs.append((f"{name} of layer {index}", mine, theirs))
        why = self._farthest(pairs)
        if why is None:
            self.trusted_prompts.add(key)
        else:
            self._refuse_prompts(model, f"{tokens} tokens of {rows} rows: {why}")
        return output

    def _prompt_engine(self, key: tuple[int, int, bool]) -> Any:
        engine = self.prompts.pop(key, None)
        if engine is None:
            if self.pool is None and self.described.model.device.type == "cuda":
                self.pool = Pool()
            engine = prompts.PromptEngine(self.described.model, *key, pool=self.pool)
            while len(self.prompts) >= _MOST_PROMPTS:
                del self.prompts[next(iter(self.prompts))]
        self.prompts[key] = engine  # the last one used stands last
        return engine

    def _forget_prompts(self) -> None:
        self.prompts.clear()
        self.trusted_prompts.clear()
        self.pool = None  # PyTorch takes no new graph into a pool that its last one has left

    def _refuse_prompts(self, model: nn.Module, why: str) -> None:
        self.prompts_refused = why
        self._forget_prompts()
        self._say(model, f"its prompts: {why}")

    # --- a turn behind a cache ---------------------------------------------------------------

    def _serve_turn(
        self, model: nn.Module, original: Forward, step: _Step, args: Any, kwargs: Any
    ) -> Any:
        """The result of more tokens than a step's: by the description, or the original's beside
        which that was proven; None: neither ran."""
        self._due = True
        rows, tokens = step.ids.shape
        length = int(step.cache.get_seq_length())
        mask = step.mask
        if step.ids.is_cuda and torch.cuda.is_current_stream_capturing():
            self.turn_reasons.setdefault("a CUDA graph is captured, which has one length")
            return None
        # nothing was queued yet that a GPU waits for
        if mask is not None and mask.shape[1] == length + tokens and bool(mask.all()):
            mask = None
        # as in a step: a GPU gets its work first, where what it reads is in place
        late = step.ids.device.type in LATE_DEVICES and self.unlike is None
        if late:
            key = self._turn_key(step, mask, length)
            late = key in self.trusted_turns and self.watch.in_place()
        if not late:
            if not (self._is_current(model) and self._may_be_turn(step.ids)):
                return None
            key = self._turn_key(step, mask, length)  # of the model that it is now
        why = self._misfit(step.ids)
        if why is not None:
            self.turn_reasons.setdefault(why)
            return None
        if not self._fits(model, step):
            return None
        asked = tokens if step.all_logits else 1
        if mask is not None and not bool(mask[:, -asked:].all()):
            # what the original reads off padding depends on the attention that was set
            self.turn_reasons.setdefault("logits are asked for of a token that is padding")
            return None
        described = self.described.model
        try:
            with _after_the_last(self, step.ids):
                if self.turns is None:
                    self.turns = turns.TurnEngine(described)
                arena = caches.take(step.cache, tokens, described)
                arena.found_fit(described)
                positions = step.positions
                if positions is None:
                    end = length + tokens
                    positions = torch.arange(length, end, device=step.ids.device).unsqueeze(0)
                logits = self.turns.run(step.ids, positions, mask, arena.table, step.all_logits)
            # what it wrote lies behind the cache's end
            ours = None if key in self.trusted_turns else arena.behind(tokens)
        except (RuntimeError, ValueError, TypeError, MemoryError) as e:
            if _is_of_memory(e):
                self._say(model, "there was no memory for a turn or a larger cache")
            else:
                self._refuse_turns(model, f"{type(e).__name__}: {e}")
            return None
        if late:
            if not self._is_current(model):
                return None
            if self.described.model is not described:  # it is another model by now
                return self._serve_turn(model, original, step, args, kwargs)
        if ours is not None:
            caches.leave_arena(step.cache)
            with nothing_captured():  # it is not called for such turns again
                output = original(model, *args, **kwargs)
            self._due = True
            shown = None if mask is None else mask[:, -tokens:].bool()
            why = self._difference(ours, logits, tokens, output, shown)
            if why is None:
                self.trusted_turns.add(key)
            else:
                self._refuse_turns(model, f"{tokens} tokens of {rows} rows behind {length}: {why}")
            return output
        arena.table.length += tokens
        self.turns_served += 1
        return self._result(logits, step.cache)

    def _turn_key(self, step: _Step, mask: Tensor | None, length: int) -> tuple[int, bool, bool]:
        rows, tokens = step.ids.shape
        windows = (layer.attention.window for layer in self.described.model.layers)
        passed = any(w is not None and w < length + tokens for w in windows)
        return rows, mask is not None, passed

    def _forget_turns(self) -> None:
        self.turns = None
        self.trusted_turns.clear()

    def _refuse_turns(self, model: nn.Module, why: str) -> None:
        self.turns_refused = why
        self._forget_turns()
        self._say(model, f"its turns behind a cache: {why}", stacklevel=7)

    # --- a step ------------------------------------------------------------------------------

    def _serve(
        self, model: nn.Module, original: Forward, step: _Step, args: Any, kwargs: Any
    ) -> Any:
        """An engine's result, or the original's beside which it was proven; None: neither ran."""
        # A GPU is given its work first, where what it reads is in place: a step writes behind the
        # cache's end and to a tensor that nobody has, so that one of no use is forgotten.
        rows, tokens = step.ids.shape
        late = step.ids.is_cuda and not self._due and (rows, tokens) in self.trusted
        late = late and self.unlike is None and self.watch.in_place()
        late = late and self.described.model.whole  # a module of its own may do anything
        if not late and not self._is_current(model):
            return None
        if (why := self._misfit(step.ids)) is not None:
            self.reasons.setdefault(why)
            return None
        if not self._fits(model, step):
            return None
        proven = (rows, tokens) in self.trusted
        chain = self.chains.of(step.ids) if proven and self.described.model.whole else None
        try:
            with _after_the_last(self, step.ids):
                engine = self._engine(model, rows, tokens)
                if engine is None:
                    return None
                arena = caches.take(step.cache, tokens, self.described.model)
                arena.found_fit(self.described.model)
                logits = self._run(engine, step, arena, chain)
        except DecodingError as e:
            self._say(model, f"the engine refused: {e}")
            return None
        except (RuntimeError, MemoryError) as e:
            if not _is_of_memory(e):  # what cannot be captured, say: it would fail at each call
                self.engines[rows, tokens] = None
                self._say(model, f"the engine failed: {type(e).__name__}: {e}")
                return None
            self._say(model, "there was no memory for an engine or a larger cache")
            return None
        if not proven:
            # what it wrote lies behind the cache's end, and the original takes the cache as it is
            ours = arena.behind(tokens)
            caches.leave_arena(step.cache)
            with nothing_captured():
                output = original(model, *args, **kwargs)
            self._judge(model, ours, logits, tokens, output)
            return output
        if late and not self._is_still_current(model):
            self._due = True
            return self._serve(model, original, step, args, kwargs)
        if chain is not None:
            chain.accept()
        arena.table.length += tokens
        self.steps += 1
        return self._result(logits, step.cache)

    def _fits(self, model: nn.Module, step: _Step) -> bool:
        """Whether cache and mask are such as the description can extend; why not is said."""
        rows, tokens = step.ids.shape
        arena = caches.held_arena(step.cache)
        if arena is None or not arena.fits(self.described.model, rows):
            why = caches.unfit(step.cache, self.described.model, rows)
            if why is not None:
                if why != caches.EMPTY:
                    self._say(model, why, stacklevel=7)
                return False
        length = step.cache.layers[0].get_seq_length()
        if step.mask is not None and step.mask.shape[1] != length + tokens:
            self._say(model, "`attention_mask` has not one column for each token", stacklevel=7)
            return False
        return True

    def _result(self, logits: Tensor, cache: Any) -> Any:
        """What a forward returns."""
        return self.described.output(logits=logits, **{caches.NAME: cache})

    def _is_current(self, model: nn.Module) -> bool:
        """Whether the engines are those of the model as it is; makes them so where they can be."""
        if (why := self.watch.wrapped(model)) is not None:
            self._say(model, why)
            return False
        parts = self.watch.in_place() and self.watch.same_parts()
        if not parts or (self._due and self.watch.changed(model)):
            if not self._take_up(model, settings_alone=parts):
                self._describe(model)
        elif self._due:
            self._looks += 1
            if self._looks == _MOST_LOOKS:  # engines and graphs have memory
                self._aside = None
        if self._copied is not None and not self._copied.hold(closely=self._due):
            self._bytes = self._copied = None
            self.engines.clear()
            self.trusted.clear()
        if self._due and (path := self.watch.trains(model)) is not None:
            self._say(model, f"`{path}` is in training mode; call `model.eval()`")
            return False
        self._due = False
        return self.unlike is None

    def _take_up(self, model: nn.Module, settings_alone: bool) -> bool:
        """Put aside what is known of the model, which has changed, and take up what was put aside
        before if it is what that was of. Some settings go to and fro: a text that drafts with the
        first layers (`assistant_early_exit`) sets how many there are twice for each few tokens.

        Args:
            settings_alone: it has the modules and tensors that it had. What is known of others is
                forgotten: it would keep their memory.
        """
        known = {name: self.__dict__[name] for name in _OF_SETTINGS}
        before, self._aside = self._aside, known if settings_alone else None
        self._looks = 0
        if before is not None and settings_alone:
            seen = before["watch"]
            as_it_was = seen.in_place() and seen.same_parts() and not seen.changed(model)
            if as_it_was and seen.wrapped(model) is None:
                self.__dict__.update(before)
                return True
        self.engines, self.trusted = {}, set()
        self.prompts, self.trusted_prompts, self.pool = {}, set(), None
        self.turns, self.trusted_turns = None, set()
        self._bytes = self._copied = None
        return False

    def _describe(self, model: nn.Module) -> None:
        """What the model is now, or why that has no description."""
        self.unlike = None
        try:
            self.described = describe(model)
        except Unexplained as e:
            self.unlike = f"it is not what it was: {e}"
            # its tensors may be another model's by now: those before a quantization, say
            self.described = replace(self.described, model=None)
            self._say(model, self.unlike)
        self.watch = Watch(model)

    def _is_still_current(self, model: nn.Module) -> bool:
        """The part of `_is_current` that is looked at while a GPU works."""
        return self.watch.same_parts() and self.watch.wrapped(model) is None

    def _engine(self, model: nn.Module, rows: int, tokens: int) -> Any:
        key = (rows, tokens)
        if key in self.engines:
            found = self.engines.pop(key)
        else:
            while len(self.engines) >= _MOST_ENGINES:
                del self.engines[next(iter(self.engines))]
            try:
                found = make_engine(self._computed(), rows, tokens)
            except (DecodingError, ValueError) as e:
                found = None
                if tokens == 1:
                    self._say(model, f"no engine for {rows} rows: {e}")
                else:  # what is behind a cache, say: the steps after it have one
                    self.reasons.setdefault(f"no engine for {tokens} tokens of {rows} rows: {e}")
        self.engines[key] = found  # the last one used stands last
        return found

    def _computed(self) -> Any:
        """The description that engines are made of."""
        if not self.choice.eight_bits:
            return self.described.model
        if self._bytes is None:
            self._copied = Samples(weights_of(self.described.model))
            self._bytes = eight_bits(self.described.model)
        return self._bytes

    def _run(
        self, engine: Any, step: _Step, arena: caches.Arena, chain: Chain | None = None
    ) -> Tensor:
        rows, tokens = step.ids.shape
        head = self.described.model.head.weight
        if chain is not None:
            logits: Tensor = engine.logits()
        else:
            logits = torch.empty(
                (rows, tokens if step.all_logits else 1, head.shape[0]),
                dtype=head.dtype,
                device=head.device,
            )
        positions = step.positions
        if positions is None:
            start = arena.length
            positions = torch.arange(start, start + tokens, device=head.device).unsqueeze(0)
        if positions.shape[0] != rows:
            positions = positions.expand(rows, -1)
        mask = step.mask
        if mask is not None and not mask.is_cuda and bool(mask.all()):
            mask = None
        more = {} if chain is None else {"chain": chain}
        engine.step(step.ids, positions, arena.table, logits, mask=mask, **more)
        return logits

    def _judge(
        self, model: nn.Module, ours: _Written, logits: Tensor, tokens: int, output: Any
    ) -> None:
        """Whether an engine's first step gave what the original gave: from now on it is used, or
        none is. ours: keys and values that it wrote."""
        key = (logits.shape[0], tokens)
        why = self._difference(ours, logits, tokens, output)
        if why is None:
            self.trusted.add(key)
            return
        self.refused = f"its first step with {key[0]} rows of {tokens} tokens: {why}"
        self.engines.clear()
        self._forget_prompts()
        self._forget_turns()
        self._aside = self.watch = self._bytes = self._copied = None  # they hold tensors
        self.described = replace(self.described, model=None)
        self._announce_refused(model)

    def _announce_refused(self, model: nn.Module) -> None:
        self._announced = True
        text = f"`{type(model).__name__}` decodes as it did: {self.refused}"
        announce_in_call(text, stacklevel=7)

    def _is_as_returned(self, output: Any) -> bool:
        """Whether an output of the original's holds what `_result` does, and no more."""
        return type(output) is self.described.output and set(output) == {"logits", caches.NAME}

    def _difference(
        self,
        ours: _Written,
        logits: Tensor,
        tokens: int,
        output: Any,
        shown: Tensor | None = None,
    ) -> str | None:
        """Where an output of the original's differs from ours; None: nowhere.

        Args:
            ours: keys and values of the new tokens.
            shown: bool `[rows, tokens]`, which of them are no padding; None: all.
        """
        if not self._is_as_returned(output):
            return f"it returns a {type(output).__name__} of {sorted(output)}"
        theirs = output.logits[:, -logits.shape[1] :]
        if (theirs.shape, theirs.dtype) != (logits.shape, logits.dtype):
            return f"logits are {theirs.dtype} of shape {tuple(theirs.shape)}"
        pairs = [("logits", logits, theirs)]
        for index, held in enumerate(output[caches.NAME].layers):
            for name in ("keys", "values"):
                theirs = getattr(held, name)[:, :, -tokens:]  # of a window it keeps fewer
                mine = ours[name][index][:, :, tokens - theirs.shape[2] :]
                if shown is not None:  # nobody sees what padding has
                    hidden = ~shown[:, None, tokens - theirs.shape[2] :, None]
                    mine, theirs = (t.masked_fill(hidden, 0) for t in (mine, theirs))
                pairs.append((f"{name} of layer {index}", mine, theirs))
        return self._farthest(pairs)

    def _farthest(self, pairs: list[tuple[str, Tensor, Tensor]]) -> str | None:
        """The first of (name, ours, the original's) that differ by more than is allowed."""
        layers = self.described.model.layers
        dtype = self.described.model.dtype
        limit = _LIMITS[dtype] * torch.finfo(dtype).eps * math.sqrt(len(layers))
        if self.choice.eight_bits:
            limit = max(limit, _BYTES_LIMIT)
        for name, ours, original in pairs:
            error = (ours.double() - original.double()).norm()
            if not bool(error <= limit * original.double().norm()):
                relative = float(error / original.double().norm())
                return (
                    f"{name} differ by {relative:.1e} from the original's, {limit:.1e} is allowed"
                )
        return None

    def _say(self, model: nn.Module, why: str, stacklevel: int = 6) -> None:
        if why not in self.reasons:
            self.reasons[why] = None
            announce_in_call(
                f"`{type(model).__name__}` was called where decoding steps cannot be used; such "
                f"calls run as they are: {why}",
                stacklevel,
            )

    def generates_without(self, model: nn.Module, why: str) -> None:
        """A call of `generate` will make no steps for a reason that its calls of the model do not
        show. Said from there."""
        if self.refused is None:
            self._say(model, why, stacklevel=4)


#: Reasons that are looked for: of a turn behind a cache, of which no warning speaks, as the steps
#: after it are an engine's, where none is served and where some are; and what the original raises
#: an error for.
_TOO_MANY = (
    f"more than {MOST_TOKENS} tokens",
    f"more than {turns.MOST_OF_A_ROW} tokens, or {turns.MOST_TOKENS} of all rows,",
)
_UNKNOWN_ID = "an id is not in the vocabulary"
_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack


def _is_computed(described: Any) -> bool:
    """Whether prompts and turns of a description are computed by it: no layer calls a module, and
    the kernels take its dtype."""
    return described.whole and described.dtype in _LIMITS


def _takes_prompts(described: Any, ids: Tensor, cache: Any) -> bool:
    """Whether a description is one of prompts too, and these begin a cache that it can fill."""
    return (
        _is_computed(described)
        and ids.device == described.device
        and caches.unfit_for_prompt(cache, described) is None
    )


def _every_module_hooked() -> bool:
    return bool(module_calls._global_forward_hooks or module_calls._global_forward_pre_hooks)


def _says_nothing(value: Any) -> bool:
    """Whether an argument is as if it were not given; `generate` hands on a dictionary of what
    images gave, which is empty where there are none."""
    return value is None or value is False or (type(value) is dict and not value)


def _is_of_memory(error: Exception) -> bool:
    """Whether memory was missing; PyTorch's allocator on a CPU has no exception of its own."""
    kinds = (torch.OutOfMemoryError, MemoryError)
    return isinstance(error, kinds) or "can't allocate memory" in str(error)


@contextmanager
def _after_the_last(decoder: Decoder, ids: Tensor) -> Iterator[None]:
    """On a stream that waits for the step before, where that ran on another: engines of a model
    share their workspace with their own last step."""
    if not ids.is_cuda:
        yield
        return
    with torch.cuda.device(ids.device):
        stream = torch.cuda.current_stream()
        if decoder.stream is not None and decoder.stream != stream:
            stream.wait_stream(decoder.stream)
        decoder.stream = stream
        yield


def make_engine(model: Any, rows: int, tokens: int) -> Any:
    """An engine for a description.

    Raises:
        DecodingError: there is none for it.
    """
    from hfpatch.decoding.engine import Engine
    from hfpatch.decoding.halves import HalvesEngine

    return (Engine if model.whole else HalvesEngine)(model, rows, tokens)


def unsupported(model: Any) -> str | None:
    """Why there is no engine for one row of a description; None if there is one."""
    from hfpatch.decoding import engine

    return engine.unsupported(model, 1)


def adapter(
    original: Forward, model: nn.Module, described: Described | str, choice: Choice
) -> Forward:
    """The forward that replaces a model's own: the steps that were asked for by an engine, all else
    by `original`.

    Args:
        described: what was found of `model` while it was planned.
    """
    owner: PerObject[nn.Module, Decoder] = PerObject()
    decoders.keep(model, Decoder(described, model, choice), owner)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return original(self, *args, **kwargs)
        held = decoders.get(self)
        if held is None:  # a copy of a patched model
            if not _is_itself(self):
                return original(self, *args, **kwargs)
            held = Decoder(_describe(self), self, choice)
            decoders.keep(self, held, owner)
        return held.run(self, original, args, kwargs)

    return forward


def _is_itself(model: nn.Module) -> bool:
    """Whether a call shows a model as it is: under `functional_call` it has the tensors of others
    for as long as the call takes, and a transform's have no memory to look at."""
    return not watched() and all(isinstance(p, nn.Parameter) for p in model.parameters())


def _describe(model: nn.Module) -> Described | str:
    try:
        return describe(model)
    except Unexplained as e:
        return str(e)
