"""Generation, pipelines, threads, hooks, several models at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from columns import Column
from pipelines import OneModelPipeline, text_pipeline
from row import Case, Row, Sum, always, both, forward, only
from torch import nn

import hfpatch

GROUP = "Serving and hooks"
NO_TEXT = "It generates no text."
GENERATES = only("causal seq2seq", NO_TEXT)


def generate(**settings: Any) -> Callable[[Case, Any], Any]:
    """Tokens and their scores; a batch whose first prompt is padded on the left."""

    def run(case: Case, model: Any) -> Any:
        g = torch.Generator().manual_seed(11)
        ids = torch.randint(3, 199, (2, 6), generator=g)
        mask = torch.ones_like(ids)
        if settings.get("pad", True):
            ids[0, :2], mask[0, :2] = 0, 0
        options = {"max_new_tokens": 5, "do_sample": False} | settings
        options.pop("pad", None)
        if (make := options.pop("assistant", None)) is not None:
            options["assistant_model"] = make(case)
            ids, mask = ids[1:], mask[1:]
        result = model.generate(
            input_ids=ids,
            attention_mask=mask,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
            pad_token_id=0,
            **options,
        )
        if settings.get("num_beams"):  # the order of unfinished beams is nobody's promise
            # a mean of log-probabilities, each of which is a logit less one of nearly its size
            largest = max(logits.abs().max().item() for logits in result.logits)
            return result.sequences, Sum(result.sequences_scores, 2 * largest)
        scores = [torch.nan_to_num(s, neginf=-1e4) for s in result.scores]
        return result.sequences, scores

    return run


def assistant(case: Case) -> nn.Module:
    return case.build(seed=5)


def patched_assistant(case: Case) -> nn.Module:
    model = case.build(seed=5)
    hfpatch.apply(model)
    return model


def step_by_step(case: Case, model: Any) -> Any:
    """A user's own loop with `past_key_values`."""
    ids = torch.tensor([[5, 17, 33, 8]])
    outputs, past = [], None
    with torch.no_grad():
        for _ in range(4):
            result = model(input_ids=ids, past_key_values=past, use_cache=True)
            past = result.past_key_values
            ids = result.logits[:, -1:].argmax(-1)
            outputs.append(result.logits[:, -1])
    return outputs


def streamed(case: Case, model: Any) -> Any:
    """`generate` with a streamer and a stopping criterion, which are called as before."""
    from transformers import StoppingCriteria, StoppingCriteriaList

    class Streamer:
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.seen.append(value.tolist())

        def end(self) -> None:
            self.seen.append("end")

    class Stop(StoppingCriteria):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.calls += 1
            return torch.full((input_ids.shape[0],), self.calls >= 3)

    streamer, stop = Streamer(), Stop()
    ids = torch.tensor([[5, 17, 33, 8]])
    result = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        do_sample=False,
        pad_token_id=0,
        streamer=streamer,
        stopping_criteria=StoppingCriteriaList([stop]),
    )
    return result, streamer.seen, stop.calls


# Pipelines --------------------------------------------------------------------------------------


def as_pipeline(case: Case, model: nn.Module) -> Any:
    if case.column.is_denoiser:
        return OneModelPipeline(model)
    return text_pipeline(model, case.column.kind)


def called_pipeline(case: Case, pipe: Any) -> Any:
    if case.column.is_denoiser:
        return case.output(pipe(**case.inputs()))
    texts = ["one two three", "four five six seven eight"]
    if case.column.kind == "encoder":
        return [torch.tensor(t) for t in pipe(texts)]
    return pipe(texts, max_new_tokens=4, do_sample=False)


# Several at once --------------------------------------------------------------------------------


def threads(case: Case, model: nn.Module) -> Any:
    """Four threads call one model at the same time, each with inputs of its own."""

    def call(scale: float) -> torch.Tensor:
        inputs = {
            k: v * scale if isinstance(v, torch.Tensor) and v.is_floating_point() else v
            for k, v in case.inputs().items()
        }
        with torch.no_grad():
            return case.output(model(**inputs))

    scales = [1.0, 0.9, 0.8, 0.7] * 2
    with ThreadPoolExecutor(4) as executor:
        return list(executor.map(call, scales))


def two_settings(case: Case, model: nn.Module) -> Any:
    """A second model of the class with other settings, patched with other arguments."""
    other = case.build(seed=3)
    for module in other.modules():
        for name in ("eps", "variance_epsilon"):
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, 0.05)
    alone = forward(case, other)
    hfpatch.apply(other, kernels="torch")
    first = forward(case, model)
    second = forward(case, other)
    error = ((second - alone).norm() / alone.norm()).item()
    assert error < 1e-5, error
    hfpatch.restore(other)
    assert torch.equal(forward(case, other), alone)
    return first, forward(case, model)


def others_of_the_class(case: Case, model: nn.Module) -> Any:
    """A model of the same classes, made before or after, is not patched."""
    twin = case.build()
    assert not hfpatch.status(twin).swaps
    assert not any("forward" in m.__dict__ for m in twin.modules())
    return forward(case, model)


# Hooks ------------------------------------------------------------------------------------------


def events(case: Case, model: nn.Module) -> list[str]:
    return case.notes.setdefault("events", [])


def hooked(case: Case, model: nn.Module, inside: bool, backward: bool = False) -> nn.Module:
    """Hooks of every kind on modules; `inside` blocks and MLPs too, else on whole layers alone."""
    seen = events(case, model)
    for path, module in model.named_modules():
        depth = sum(part.isdigit() for part in path.split("."))
        last = path.rpartition(".")[2]
        if not (inside or (depth <= 1 and (last.isdigit() or not depth))):
            continue

        def before(m: nn.Module, args: Any, path: str = path) -> None:
            seen.append(f"pre {path}")

        def after(m: nn.Module, args: Any, kwargs: Any, out: Any, path: str = path) -> None:
            seen.append(f"post {path} {sorted(kwargs)}")

        def back(m: nn.Module, g_in: Any, g_out: Any, path: str = path) -> None:
            seen.append(f"backward {path}")

        if backward:
            module.register_full_backward_hook(back)
        else:
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after, with_kwargs=True)
    return model


def with_events(case: Case, model: nn.Module) -> Any:
    seen = events(case, model)
    seen.clear()
    output = forward(case, model)
    assert seen
    return output, list(seen)


def with_backward_events(case: Case, model: nn.Module) -> Any:
    seen = events(case, model)
    seen.clear()
    output = case.output(model(**case.inputs()))
    output.float().pow(2).mean().backward()
    for p in model.parameters():
        p.grad = None
    assert seen
    return output.detach(), list(seen)


def changing_hooks(case: Case, model: nn.Module) -> nn.Module:
    """Hooks that change what they see: losing one shows in the output."""
    for path, module in model.named_modules():
        if "norm" in path.rpartition(".")[2] and not module._modules:
            module.register_forward_hook(lambda m, args, out: out * 1.1)
    return model


def capturing(case: Case, model: nn.Module) -> Any:
    """What every norm and MLP returned, as feature extractors collect it."""
    caught: dict[str, torch.Tensor] = {}
    handles = []
    for path, module in model.named_modules():
        if any(w in path.rpartition(".")[2] for w in ("norm", "mlp", "ff")):

            def keep(m: nn.Module, args: Any, out: Any, path: str = path) -> None:
                if isinstance(out, torch.Tensor):
                    caught[path] = out.clone()

            handles.append(module.register_forward_hook(keep))
    output = forward(case, model)
    for handle in handles:
        handle.remove()
    return output, dict(sorted(caught.items()))


def hidden_states(case: Case, model: nn.Module) -> Any:
    with torch.no_grad():
        result = model(**case.inputs(), output_hidden_states=True)
    name = "encoder_hidden_states" if case.column.kind == "seq2seq" else "hidden_states"
    states = result[name]
    assert len(states) >= 3
    return case.output(result), list(states)


def global_hooks(case: Case, model: nn.Module) -> Any:
    """`register_module_forward_hook`: calls of leaves that no kernel of a wider module covers."""
    from torch.nn.modules.module import register_module_forward_hook

    calls = 0

    def count(m: nn.Module, args: Any, out: Any) -> None:
        nonlocal calls
        calls += m is model

    handle = register_module_forward_hook(count)
    try:
        output = forward(case, model)
    finally:
        handle.remove()
    return output, calls


ON_ALL = (
    "While a hook on all modules is registered, blocks and MLPs whose parts would not be called "
    "step aside, so that it fires for these too."
)
INSIDE = (
    "A hook on a module that the fused forward would not call makes that block or MLP step aside, "
    "so that the hook fires: where hooks come first its parts are patched, where they come later "
    "it runs as the original."
)
CACHED = "transformers runs this generation mode for models with plain attention caches alone."


def _inside(case: Case, model: nn.Module) -> nn.Module:
    return hooked(case, model, inside=True)


def _outside(case: Case, model: nn.Module) -> nn.Module:
    return hooked(case, model, inside=False)


def _backward(case: Case, model: nn.Module) -> nn.Module:
    return hooked(case, model, inside=False, backward=True)


def _text(title: str, run: Any, unless: Callable[[Column], str | None] = always) -> Row:
    return Row(GROUP, title, run=run, unless=both(GENERATES, unless), lasting=False)


PLAIN_CACHE = only("llama qwen3 gemma3 t5-v1.1", CACHED)
ROWS = (
    _text("`generate`, greedy, padded batch", generate()),
    _text("`generate`, sampling with a seed", generate(do_sample=True, temperature=0.8, top_k=20)),
    _text("`generate`, beam search", generate(num_beams=3)),
    _text(
        "`generate`, static cache", generate(cache_implementation="static", pad=False), PLAIN_CACHE
    ),
    _text("`generate`, no cache", generate(use_cache=False)),
    _text("`generate`, assisted", generate(assistant=assistant), PLAIN_CACHE),
    _text(
        "`generate`, assisted by a patched model",
        generate(assistant=patched_assistant),
        PLAIN_CACHE,
    ),
    _text("`generate` with a streamer and a stopping criterion", streamed),
    _text(
        "own loop with `past_key_values`",
        step_by_step,
        only("causal", "Its decoder takes the encoder's states too; `generate` is tested."),
    ),
    Row(GROUP, "`pipeline(...)`", as_pipeline, called_pipeline, lasting=False),
    Row(GROUP, "called by several threads", run=threads, forwards=8),
    Row(GROUP, "two models of a class, different settings", run=two_settings),
    Row(GROUP, "other models of the class stay as they are", run=others_of_the_class, forwards=1),
    Row(GROUP, "forward and pre-hooks on whole layers", _outside, with_events, forwards=1),
    Row(
        GROUP,
        "forward and pre-hooks on every module",
        _inside,
        with_events,
        forwards=1,
        why={"partly": INSIDE, "original": INSIDE},
    ),
    Row(
        GROUP,
        "hooks that change what a norm returns",
        changing_hooks,
        why={"partly": INSIDE, "original": INSIDE},
    ),
    Row(
        GROUP,
        "outputs of norms and MLPs captured by hooks for one call",
        run=capturing,
        forwards=1,
        why={"partly": INSIDE, "original": INSIDE},
    ),
    Row(
        GROUP,
        "backward hooks on whole layers",
        _backward,
        with_backward_events,
        mode="training",
        why={
            "partly": 'Fused blocks have no gradient: in `mode="training"` their parts that have '
            "one are patched."
        },
    ),
    Row(
        GROUP,
        "global module hooks",
        run=global_hooks,
        forwards=1,
        why={"partly": ON_ALL, "original": ON_ALL},
    ),
    Row(
        GROUP,
        "`output_hidden_states=True`",
        run=hidden_states,
        forwards=1,
        unless=only("causal seq2seq encoder", "diffusers' models return none."),
    ),
)
