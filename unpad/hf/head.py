"""Loss at target positions alone: logits of tokens without a target never exist.

Prompts and the last tokens of sequences have no target, and in conversations they are most of the tokens. A hook
behind the backbone keeps the hidden states of targets, so that the head of the model, whatever it does, computes the
logits of those. Where the head is one matrix product, the loss is computed in chunks, and their logits do not exist
together either.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from transformers import PreTrainedModel

from unpad.hf.attention import outside_graphs
from unpad.hf.loader import IGNORED
from unpad.nn.autograd import apply
from unpad.nn.linear import computing_copy
from unpad.nn.losses import chunk_bytes, cross_entropy, memory_of
from unpad.nn.precision import wide_dtype
from unpad.proof.foreign.judge import raise_memory
from unpad.proof.foreign.model import no_router_loss, untouched

BLOCK_CELLS = 1 << 18  # logits that are scored at a time, few enough for a core's cache


class Scored(NamedTuple):
    """Scores of targets.

    Args:
        total: sum of the negative log-likelihoods, a scalar in nats, with a gradient.
        nll, entropy: of every target, (num_targets,) in nats, without.
        is_top1: (num_targets,) bool.
    """

    total: Tensor
    nll: Tensor
    entropy: Tensor
    is_top1: Tensor


def scored_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Scored:
    """Score targets by `hidden @ weight.T`, chunk by chunk; the forward pass computes the gradient.

    Args:
        hidden: (num_targets, dim), in the computing dtype.
        weight: (vocab_size, dim).
        labels: (num_targets,) int64.
    """
    return Scored(*apply(_Scored, hidden, weight, labels))


class _Scored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        wide = wide_dtype(hidden.dtype)
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        low = computing_copy(weight, hidden.dtype)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if need_weight else None
        rows = max(64, chunk_bytes(memory_of(hidden.device)) // (hidden.itemsize * len(weight)))
        parts = []
        for start in range(0, len(hidden), rows):
            span = slice(start, start + rows)
            logits = hidden[span] @ low.t()
            parts.append(_score_(logits, labels[span], need_hidden or need_weight))
            if grad_hidden is not None:
                torch.matmul(logits, low, out=grad_hidden[span])
            if grad_weight is not None and wide == logits.dtype:
                grad_weight.addmm_(logits.t(), hidden[span])
            elif grad_weight is not None:
                grad_weight += logits.t() @ hidden[span]
        nll, entropy, is_top1 = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(nll, entropy, is_top1)
        return nll.sum(), nll, entropy, is_top1

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if saved is None else saved * grads[0] for saved in ctx.saved_tensors), None)


def _score_(logits: Tensor, labels: Tensor, want_grad: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihood, entropy and rank of every row; logits (rows, vocab_size) become their sum's gradient."""
    rows = max(1, BLOCK_CELLS // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    parts = []
    for own, label in zip(logits.split(rows), labels.split(rows), strict=True):
        x = own.to(wide_dtype(own.dtype))
        largest, place = x.max(-1)
        p = (x - largest[:, None]).exp_()
        total = p.sum(-1)
        log_z = largest + total.log()
        p /= total[:, None]
        nll = log_z - x.gather(1, label[:, None])[:, 0]
        parts.append((nll, log_z - torch.linalg.vecdot(p, x), place == label))
        if want_grad:
            p.scatter_add_(1, label[:, None], p.new_full((len(p), 1), -1))
            own.copy_(p)
    nll, entropy, is_top1 = (torch.cat(column) for column in zip(*parts, strict=True))
    return nll, entropy, is_top1


Mode = Literal["chunks", "targets", "all"]
ROUNDINGS = 64  # of the loss and gradients, which may differ by so many between two ways of adding up
LARGE = 1000.0  # factor of hidden states with which a cap on logits shows


class TargetHead:
    """Hooks of a model that compute its loss at target positions.

    Args:
        model: what is called; inner: the model of transformers in it.
        backbone: the part with the hidden states for output that the head reads; None if none is known, so that all
            logits are computed.

    Attributes:
        mode: "chunks", the head is a matrix product and its loss is computed by us; "targets", the model's own head and
            loss on the hidden states of targets; "all", logits of all tokens, since the others give another loss.
        active: whether the model is called for its loss alone. Elsewhere all logits are computed.
    """

    def __init__(self, model: nn.Module, inner: PreTrainedModel, backbone: nn.Module | None) -> None:
        self.mode: Mode = "all"
        self.active = False
        self.inner = inner
        self.hidden: Tensor | None = None  # of all tokens, kept in the trial
        self.amplify = 1.0
        self.keep = False
        self.places: Tensor | None = None  # cells of the batch with a target, (num_targets,) int64
        self.targets: Tensor | None = None  # their target tokens, (num_targets,) int64
        self.total: Tensor | None = None  # sum of their losses
        self.scored: Scored | None = None  # what SFTTrainer logs of them besides
        self.fused = False  # whether the forward pass at hand is one of the head that TRL adds
        self.original: Callable[..., Tensor] = inner.loss_function
        self.hooks = [
            model.register_forward_pre_hook(self._find_targets, with_kwargs=True),
            model.register_forward_hook(self._give_scores, with_kwargs=True),
        ]
        if backbone is not None:
            self.hooks.append(backbone.register_forward_hook(self._keep_targets))
        inner.loss_function = self._loss

    def is_there(self) -> bool:
        """True if all hooks are where they were put."""
        return all(hook.id in (hook.hooks_dict_ref() or ()) for hook in self.hooks)

    def remove(self) -> None:
        """Take the hooks away, and give the model its loss function back."""
        for hook in self.hooks:
            hook.remove()
        self.inner.loss_function = self.original

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Call the model for its loss alone inside."""
        self.active = True
        try:
            yield
        finally:
            self.active = False

    def _forget(self) -> None:
        """Keep nothing of a batch: a model with tensors of a graph could not be copied."""
        self.places = self.targets = self.total = self.scored = None

    @outside_graphs
    def _find_targets(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        self._forget()
        labels = kwargs.get("labels")
        if not self.active or self.mode == "all" or labels is None or kwargs.get("shift_labels") is not None:
            return None
        following = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
        places = (following != IGNORED).nonzero().flatten()
        if not len(places):
            return None
        self.places, self.targets = places, following[places]
        self.fused = bool(kwargs.get("fused_lm_head"))
        if not self.fused:
            return None
        # TRL's head reads labels itself: those of the hidden states that it will get.
        shown = self.targets.new_full((1, 1), IGNORED) if self.mode == "chunks" else self.targets[None]
        return args, {**kwargs, "shift_labels": shown}

    @outside_graphs
    def _keep_targets(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        given = hidden = _hidden(out)
        if hidden is None:
            return None
        if self.amplify != 1:
            hidden = hidden * self.amplify
        if self.keep:
            self.hidden = hidden
        if self.places is not None and self.targets is not None:
            hidden = hidden.flatten(0, 1).index_select(0, self.places)
            if self.mode == "chunks":
                weight = self.inner.get_output_embeddings().weight
                weight = weight if torch.is_grad_enabled() else weight.detach()
                if torch.is_autocast_enabled(hidden.device.type):  # the head computes in this type there
                    hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
                if self.fused:
                    self.scored = scored_cross_entropy(hidden, weight, self.targets)
                else:
                    self.total = cross_entropy(hidden, weight, self.targets)[0]
                hidden = hidden[:1].detach()
            hidden = hidden[None]
        return None if hidden is given else with_hidden(out, hidden)

    @outside_graphs
    def _give_scores(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Put our scores into the output of TRL's head, with (1, num_targets) of each."""
        scored = self.scored
        self._forget()
        if scored is None:
            return
        total, nll, entropy, is_top1 = scored
        own_share = (total - total.detach()) / len(nll)  # 0, with the gradient of the sum
        out.log_probs = -(nll + own_share)[None]
        out.entropy, out.is_top1 = entropy[None], is_top1[None]
        out.label_mask = torch.ones_like(is_top1)[None]
        count = kwargs.get("num_items_in_batch")
        out.loss = total / (len(nll) if count is None else count)

    def _loss(
        self, logits: Tensor, labels: Tensor, *args: Any, num_items_in_batch: Tensor | int | None = None, **kwargs: Any
    ) -> Tensor:
        """The loss function of the model: of the targets that the hooks kept, or as it was."""
        if self.total is not None and self.targets is not None:
            count = len(self.targets) if num_items_in_batch is None else num_items_in_batch
            return self.total / (count.to(self.total.device) if isinstance(count, Tensor) else count)
        if self.targets is not None:
            kwargs["shift_labels"] = self.targets[None]
        return self.original(logits, labels, *args, num_items_in_batch=num_items_in_batch, **kwargs)


def add_target_head(model: nn.Module, inner: PreTrainedModel, batch: Mapping[str, Any], *, fused: bool) -> TargetHead:
    """Add the hooks in the first mode that gives the loss and gradients of all positions.

    Args:
        batch: of a few sequences with targets, on the model's device.
        fused: whether the trainer is TRL's SFTTrainer, which adds a head to the model and calls it.
    """
    batch = {**batch, **({"fused_lm_head": True} if fused else {})}
    with untouched(model), no_router_loss(model):
        model.eval()
        backbone = _backbone(model, inner, batch)
    head = TargetHead(model, inner, backbone)
    try:
        with untouched(model), no_router_loss(model):
            model.eval()
            head.mode = "all" if backbone is None else _first_exact(head, model, inner, batch)
    except BaseException:
        head.remove()
        raise
    return head


@torch.no_grad()
def _backbone(model: nn.Module, inner: PreTrainedModel, batch: Mapping[str, Any]) -> nn.Module | None:
    """The part of a model that is called for hidden states, with a loss and without, and gives them for every token.

    Some heads call a part of the base model and not the base model itself. None for a model that computes no loss of
    its own, whose head is unknown, or whose parts give nothing of that shape.
    """
    if inner.get_output_embeddings() is None:
        return None
    shape = batch["input_ids"].shape
    called: list[nn.Module] = []

    def note(module: nn.Module, _: object, out: Any) -> None:
        hidden = _hidden(out)
        if hidden is not None and hidden.shape[:-1] == shape:
            called.append(module)

    base = inner.base_model
    decoders = [one.get_decoder() for one in (inner, base) if isinstance(one, PreTrainedModel)]
    parts = [one for one in dict.fromkeys((base, *decoders)) if one not in (inner, model)]
    hooks = [one.register_forward_hook(note) for one in parts]
    try:
        with_loss, without = batch, {name: batch[name] for name in batch if name not in ("labels", "fused_lm_head")}
        found = []
        for given in (with_loss, without):
            called.clear()
            model(**given)
            found.append(set(called))
    except Exception as error:
        raise_memory(error)
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return next((one for one in parts if all(one in each for each in found)), None)


def _hidden(out: Any) -> Tensor | None:
    """The hidden states in the output of a backbone: the first of a tuple, or of an object of transformers."""
    found = out.get("last_hidden_state") if isinstance(out, dict) else out[0] if isinstance(out, tuple) and out else out
    return found if isinstance(found, Tensor) and found.dim() == 3 and found.is_floating_point() else None


def with_hidden(out: Any, hidden: Tensor) -> Any:
    """The output of a backbone with other hidden states."""
    if isinstance(out, Tensor):
        return hidden
    if isinstance(out, tuple):
        return (hidden, *out[1:])
    out["last_hidden_state"] = hidden
    return out


def _first_exact(head: TargetHead, model: nn.Module, inner: PreTrainedModel, batch: Mapping[str, Any]) -> Mode:
    """The first mode that gives the loss and gradients of all positions."""
    try:
        wanted = _loss_and_gradients(head, model, inner, batch)
    except Exception as error:  # no loss, or none that can be followed: it is the trainer's own
        raise_memory(error)
        return "all"
    modes: tuple[Mode, ...] = ("chunks", "targets")
    for mode in modes:
        if mode == "chunks" and not _is_product(head, model, inner, batch):
            continue
        head.mode = mode
        try:
            with head.alone():
                found = _loss_and_gradients(head, model, inner, batch)
        except Exception as error:
            raise_memory(error)
            continue
        if all(map(_close, found, wanted)):
            return mode
    return "all"


def _loss_and_gradients(
    head: TargetHead, model: nn.Module, inner: PreTrainedModel, batch: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """The loss, and its gradients with respect to the hidden states of all tokens and the head's weights that learn."""
    head.keep = True
    try:
        loss = model(**batch).loss
        learning = [weight for weight in inner.get_output_embeddings().parameters() if weight.requires_grad]
        leaves = [*([head.hidden] if head.hidden is not None and head.hidden.requires_grad else []), *learning]
        return (loss.detach(), *torch.autograd.grad(loss, leaves)) if leaves else (loss.detach(),)
    finally:
        head.keep, head.hidden = False, None


@torch.no_grad()
def _is_product(head: TargetHead, model: nn.Module, inner: PreTrainedModel, batch: Mapping[str, Any]) -> bool:
    """True if logits are the product of hidden states and the head's weights, with no factor, cap or bias."""
    batch = {name: value for name, value in batch.items() if name not in ("labels", "fused_lm_head")}
    linear = inner.get_output_embeddings()
    if type(linear) is not nn.Linear or linear.bias is not None:
        return False
    head.keep, head.amplify = True, LARGE
    try:
        logits = model(**batch).logits
        return head.hidden is not None and _close(logits, F.linear(head.hidden, linear.weight))
    finally:
        head.keep, head.amplify, head.hidden = False, 1.0, None


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    size = float(other.double().norm())
    allowed = ROUNDINGS * torch.finfo(other.dtype).eps * size
    return bool((one.double() - other.double()).norm() <= allowed)
