"""AdamW for models whose first layer touches a few rows of its weight per batch.

Knows gradients, dense and sparse; nothing of predictors or training loops.

Shapes: V rows of a weight, W columns, U rows in a sparse gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

CHUNK_ELEMENTS = 2**20
"""Elements of a weight that are updated at a time."""


class LazyAdamW(torch.optim.AdamW):
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) that takes sparse gradients beside dense ones.

    Parameters with dense gradients are handed to ``torch.optim.AdamW``. Of a parameter with a sparse gradient, the
    rows in the gradient are updated by the same formula, weight decay included, with the parameter's own count of
    steps. Rows that are not in it stand still, their moments and their decay too, as in ``torch.optim.SparseAdam``:
    this is what makes a step cost U rows instead of V, and where it differs from AdamW on dense gradients.

    Moments of such a parameter take memory for rows that were ever touched: they are kept in the order of first
    touch, at the front of buffers whose other pages the operating system never has to provide (a GPU reserves all of
    them). The state dict holds the touched rows only, as plain tensors.

    Args:
        params: parameters or groups of them, as for any optimizer.
        lr: step size.
        betas: decay of the first and of the second moment.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ):
        # fused: one pass over a parameter, and no temporaries of its size
        super().__init__(params, lr, betas, eps, weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step; ``closure``, if given, computes the loss that is returned, and the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        lazy = [
            (group, parameter, parameter.grad)
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter.grad.is_sparse
        ]
        self._refuse_mixed({parameter for _, parameter, _ in lazy})
        try:
            for _, parameter, _ in lazy:
                parameter.grad = None  # AdamW passes over it
            super().step()
        finally:
            for _, parameter, gradient in lazy:
                parameter.grad = gradient
        for group, parameter, gradient in lazy:
            _step_rows(parameter, *_rows_of(gradient), self.state[parameter], group)
        return loss

    def _refuse_mixed(self, lazy: set[Tensor]) -> None:
        for parameter, state in self.state.items():
            if parameter.grad is not None and state and ("places" in state) != (parameter in lazy):
                kinds = ("dense", "sparse") if parameter in lazy else ("sparse", "dense")
                raise RuntimeError(f"a parameter of {kinds[0]} gradients so far got a {kinds[1]} one")

    def state_dict(self) -> dict[str, Any]:
        """As of any optimizer; of a parameter with sparse gradients ``step``, ``rows``, ``exp_avg``, ``exp_avg_sq``.

        ``rows`` (int64) are the rows ever touched, in order of first touch, and the moments are those of these rows.
        """
        saved = super().state_dict()
        return saved | {"state": {key: _packed(state) for key, state in saved["state"].items()}}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues exactly where :meth:`state_dict` was taken."""
        packed = {key: state for key, state in state_dict["state"].items() if "rows" in state}
        rest = {key: state for key, state in state_dict["state"].items() if key not in packed}
        # AdamW would turn the row numbers into floats
        super().load_state_dict(state_dict | {"state": rest})
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            if key in packed:
                self.state[parameter] = _unpacked(parameter, packed[key])


def _rows_of(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Rising row numbers (int64 ``[U]``) and their gradients (``[U, W]``) of a sparse gradient."""
    rows = gradient._indices()[0]
    # Autograd keeps a coalesced gradient as it is but forgets that it is one: coalescing again would copy all of it.
    if not gradient.is_coalesced() and bool((rows.diff() <= 0).any()):
        gradient = gradient.coalesce()
    return gradient._indices()[0], gradient._values()


def _step_rows(
    parameter: Tensor, rows: Tensor, gradients: Tensor, state: dict[str, Any], group: dict[str, Any]
) -> None:
    """AdamW on the given rows of a parameter."""
    if not state:
        state.update(_fresh(parameter))
    places = _places(rows, state)
    chunk = min(len(rows), max(1, CHUNK_ELEMENTS // max(1, parameter[0].numel())))
    whole = (parameter, state["exp_avg"], state["exp_avg_sq"])
    copies = [tensor.new_empty(chunk, *tensor.shape[1:]) for tensor in whole]
    for start in range(0, len(rows), chunk or 1):
        part = slice(start, start + chunk)
        at = (rows[part], places[part], places[part])
        weight, exp_avg, exp_avg_sq = parts = [copy[: len(at[0])] for copy in copies]
        for tensor, index, out in zip(whole, at, parts, strict=True):
            torch.index_select(tensor, 0, index, out=out)
        adamw(
            [weight], [gradients[part]], [exp_avg], [exp_avg_sq], [], [state["step"].clone()],  # which it counts up
            fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip
        for tensor, index, updated in zip(whole, at, parts, strict=True):
            tensor.index_copy_(0, index, updated)
    state["step"] += 1


def _fresh(parameter: Tensor) -> dict[str, Any]:
    """State of a parameter of which no row was touched."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "places": torch.full((len(parameter),), -1, dtype=torch.int64, device=parameter.device),
        "touched": 0,
        "exp_avg": torch.empty_like(parameter),
        "exp_avg_sq": torch.empty_like(parameter),
    }


def _places(rows: Tensor, state: dict[str, Any]) -> Tensor:
    """Where the moments of ``rows`` are; those touched for the first time get a place, and zeros."""
    places, touched = state["places"], state["touched"]
    new = rows[places[rows] < 0]
    end = touched + len(new)
    places[new] = torch.arange(touched, end, device=rows.device)
    for name in ("exp_avg", "exp_avg_sq"):
        state[name][touched:end].zero_()
    state["touched"] = end
    return places[rows]


def _packed(state: dict[str, Any]) -> dict[str, Any]:
    if "places" not in state:
        return state
    places, touched = state["places"], state["touched"]
    rows = (places >= 0).nonzero().squeeze(1)
    return {
        "step": state["step"],
        "rows": rows[places[rows].argsort()],
        # copies: saving a part of a tensor saves all of its memory
        "exp_avg": state["exp_avg"][:touched].clone(),
        "exp_avg_sq": state["exp_avg_sq"][:touched].clone(),
    }


def _unpacked(parameter: Tensor, packed: dict[str, Any]) -> dict[str, Any]:
    state = _fresh(parameter)
    _places(packed["rows"].to(parameter.device), state)
    state["step"].copy_(packed["step"])
    for name in ("exp_avg", "exp_avg_sq"):
        state[name][: state["touched"]] = packed[name].to(parameter.device)
    return state
