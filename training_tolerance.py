"""One tensor against another: the criterion, its defaults, and what is measured on the way.

A tensor passes if both hold:

    element by element    |actual - reference| <= atol + rtol * |reference|
    as a whole            norm(actual - reference) <= norm_eps * eps * norm(reference)

eps is the spacing of the dtype's numbers at 1. The defaults are rtol = 64 eps, atol = rtol times the
largest magnitude in the reference, norm_eps = 16; in bfloat16 8 eps and 2. NUMERICS.md has the
measurements behind them. Some kinds of tensors are allowed more: callers say how much, see Allowance.
"""

from collections import defaultdict
from collections.abc import Mapping
from math import inf
from typing import NamedTuple

import torch

from training_records import Steps, Tensors, optimizer_of, trained

# Measured by tests/tools/measure_error.py: clean runs stay at least four times below both.
ELEMENT_EPS = 64.0  # default rtol, in eps of the dtype: 7.6e-6 in float32
NORM_EPS = 16.0  # default norm_eps
# A gradient below this share of the largest one of its step is zero but for rounding, such as that of a
# bias before a batch norm: 16 eps of float32, whatever the dtype.
NEGLIGIBLE = 16 * 2.0**-23
# In types with few digits, such as bfloat16, where 16 eps are 12.5 %. Clean runs stay below 0.4 eps, but for
# vectors: the gradient of a norm's bias, which some kernels add up in bfloat16, has been off by 12.
COARSE, COARSE_NORM_EPS = 2.0**-20, 2.0
# Optimizers whose update is proportional to the gradient. Any other may turn a gradient that is zero but
# for rounding into a full step.
LINEAR = ("SGD", "ASGD")
DRIFT_FACTOR, DRIFT_EPS = 6, 1024  # see drift_allowance


class Tolerance(NamedTuple):
    """What --rtol, --atol and --norm-eps say; None where the default applies."""

    rtol: float | None = None
    atol: float | None = None
    norm_eps: float | None = None


class Allowance(NamedTuple):
    """What a caller allows in addition to the tolerance, and what the error is given relative to."""

    element: torch.Tensor | float = 0.0  # absolute error of each element
    norm: float = 0.0  # absolute norm of the error
    only_by_default: bool = False  # with --rtol neither is allowed: that option then says all
    relative_to: float | None = None  # Result.eps is given relative to this norm; None: the reference's
    floor: float = 0.0  # if both tensors stay below it, they are zero but for rounding, and pass


class Result(NamedTuple):
    """How one tensor of one rank and step compares."""

    passed: bool
    score: float = 0.0  # the error as a share of what is allowed; above 1 it failed
    eps: float = 0.0  # norm of the error over norm of the reference, in eps of the dtype
    needed_rtol: float = 0.0  # smallest rtol under which it would have passed; inf if none would
    needed_norm_eps: float = 0.0  # the same for norm_eps
    message: str = ""  # for a failed one: where and by how much; for a passed one: why it was not compared


DEFAULTS = Tolerance()
NOTHING_MORE = Allowance()


# ---------------------------------------------------------------- measuring


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float64 or complex128, in which every dtype can be computed with."""
    return tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64)


def eps_of(*tensors: torch.Tensor) -> float:
    """Return the coarsest eps of the floating-point tensors among these; 0 if there are none."""
    return max(
        (torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point() or t.is_complex()), default=0.0
    )


def unit_of(steps: Steps, trusted: Steps | None) -> float:
    """Return the eps in which a run's errors are judged: the coarsest of its trained parameters' dtypes.

    trusted: the run whose outputs, gradients and deltas count, too. Autocast in the reference allows
    more. Autocast in the run in question alone is a difference, and no reason to allow more.
    """
    kinds = ("outputs", "gradients", "deltas")
    values = [tensor for (kind, _), tensor in trusted[1].items() if kind in kinds] if trusted else []
    return eps_of(*trained(steps), *values)


def largest(tensors: Tensors, kind: str) -> float:
    """Return the largest magnitude among the tensors of a kind, 0 if there are none."""
    return max((wide(t).abs().max().item() for (k, _), t in tensors.items() if k == kind), default=0.0)


def factor(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the s for which s * reference is nearest to actual, by least squares; 0 for a reference of 0."""
    a, r = wide(actual).flatten(), wide(reference).flatten()
    square = r.dot(r).item()
    return a.dot(r).item() / square if square else 0.0


def relative_error(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """Return norm(actual - reference) / norm(reference), computed in float64.

    It is infinite for what cannot be compared: another shape, a value that is not finite, a reference
    of zeros.
    """
    if actual.shape != reference.shape or not (actual.isfinite().all() and reference.isfinite().all()):
        return inf
    norm = wide(reference).norm().item()
    return (wide(actual) - wide(reference)).norm().item() / norm if norm else inf


# ---------------------------------------------------------------- what is allowed on top


def bound_of(eps: float, dimensions: int, norm_eps: float | None) -> float:
    """Return the number of eps that is allowed of a norm, if --norm-eps sets none."""
    if norm_eps is not None:
        return norm_eps
    return COARSE_NORM_EPS if eps > COARSE and dimensions > 1 else NORM_EPS


def allow_rounding_of(parameter: torch.Tensor, eps: float) -> Allowance:
    """Return what is allowed of a delta: the rounding of the parameter whose two values it separates.

    The difference of two nearly equal numbers has their rounding errors. Allowed are 2 eps of the
    parameter's largest element for each element, and 2 eps of its norm in norm.
    """
    values = wide(parameter)
    norm = values.norm().item()
    return Allowance(2 * eps * values.abs().max(), 2 * eps * norm, relative_to=norm)


def allow_movement(reference: torch.Tensor, initial: torch.Tensor, unit: float) -> Allowance:
    """Return what is allowed of a parameter for what was added to it since training began.

    A float32 parameter may move by bfloat16 gradients. Then its initial value is judged in eps of float32
    and its movement in the unit, eps of bfloat16.
    """
    moved = wide(reference) - wide(initial)
    bound = bound_of(unit, moved.dim(), None) * unit
    element, norm = ELEMENT_EPS / NORM_EPS * bound * moved.abs().max(), bound * moved.norm().item()
    return Allowance(element, norm, only_by_default=True)


def allow_slack(allowance: Allowance, slack: torch.Tensor | None) -> Allowance:
    """Add an absolute error of each element, which the oracle gives where a ReLU's sign is in doubt."""
    if slack is None:
        return allowance
    return allowance._replace(element=allowance.element + slack, norm=allowance.norm + slack.norm().item())


def allow_share(allowance: Allowance, reference: torch.Tensor, share: float) -> Allowance:
    """Add a share of the reference's norm, and as an element's error 4 times that of its largest element."""
    values = wide(reference)
    element = ELEMENT_EPS / NORM_EPS * share * values.abs().max()
    return allowance._replace(
        element=allowance.element + element, norm=allowance.norm + share * values.norm().item()
    )


def adaptive_slacks(
    content: dict, steps: Steps, others: Steps, unit: float
) -> tuple[list[Tensors], list[float]]:
    """Return by step by how much Adam, or its kin, may move each element otherwise, because of rounding.

    content, steps: of the reference; others: the run that is compared with it. Also returned is by which
    share the tensors of each step may differ, since its parameters do: see drift_share.

    Adam's step is about rate * g / sqrt(mean of g squared), for each element by itself. Rounding of an
    element is up to r = 64 eps * (root mean square of the gradient), whatever its own size g. So it may move
    by rate * min(2, r / g) more or less; g is the smaller one of both runs'. An element that is zero in both
    does not move. As Adam remembers gradients, the most of all steps so far is allowed. A gradient below the
    floor is nothing but rounding: its parameter does not change the loss. What parameters may differ by adds
    up over the steps.
    """
    slacks: list[Tensors] = [{}]
    drifts, moved, shares = [0.0, 0.0], {}, {}
    for step, (tensors, other) in enumerate(zip(steps[1:], others[1:], strict=True), start=1):
        slack = {key: value for key, value in slacks[-1].items() if key[0] == "parameters"}
        slacks.append(slack)
        floor = None
        for key in [key for key in tensors if key[0] == "gradients" and key in other]:
            kind, rate = optimizer_of(content, step, key[1])
            if kind.split(" ")[0] in LINEAR or not isinstance(rate, int | float):
                continue
            floor = floor_of(tensors, unit) if floor is None else floor
            size = wide(tensors[key]).abs()
            silent = bool(size.max() <= floor)
            error = ELEMENT_EPS / NORM_EPS * (NORM_EPS * unit + drifts[step])
            rounding = error * size.square().mean().sqrt()
            size = torch.minimum(size, wide(other[key]).abs())
            either = (tensors[key] != 0) | (other[key] != 0)
            share = torch.where(either, 2.0 if silent else (rounding / size).clamp(max=2.0), 0.0)
            shares[key] = torch.maximum(shares.get(key, share), share)
            delta, parameter = ("deltas", key[1]), ("parameters", key[1])
            slack[delta] = rate * largest_step(kind) * shares[key]
            slack[parameter] = slack.get(parameter, 0.0) + slack[delta]
            if not silent:
                value = wide(tensors[parameter])
                moved[key[1]] = (wide(other[parameter]) - value).norm().item(), value.norm().item()
        drifts.append(drift_share(moved, unit))
    return slacks, drifts


def largest_step(optimizer: str, alpha: float = 0.99) -> float:
    """Return how many times its learning rate an optimizer may move an element in its first step.

    RMSprop divides by the root of the mean of g squared, which begins as (1 - alpha) * g squared.
    """
    return (1 - alpha) ** -0.5 if optimizer == "RMSprop" else 1.0


def floor_of(tensors: Tensors, unit: float) -> float:
    """Return the magnitude below which a gradient of this step is zero but for rounding."""
    return share_of_rounding(unit) * largest(tensors, "gradients")


def share_of_rounding(unit: float) -> float:
    """Return which share of a step's largest gradient may be rounding.

    In bfloat16 the gradient of the keys' biases, which is zero, was 5e-5 of the largest, and the smallest of
    any other parameter 3e-3.
    """
    return unit / 16 if unit > COARSE else NEGLIGIBLE


def drift_share(measured: Mapping[str, tuple[float, float]], unit: float) -> float:
    """Return by which share activations and gradients may differ, since parameters do.

    measured: by parameter the norm of its difference, and its own. One element of a weight that Adam moved
    otherwise, because its gradient was next to zero, has been seen to change gradients by 3.5 times the share
    by which the weight differs. More than DRIFT_EPS would hide mistakes.
    """
    by_module: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for parameter, (difference, norm) in measured.items():
        squares = by_module[parameter.rpartition(".")[0]]
        squares[0] += difference**2
        squares[1] += norm**2
    share = sum(difference / own for difference, own in by_module.values() if own) ** 0.5
    return min(DRIFT_FACTOR * share, DRIFT_EPS * unit)


# ---------------------------------------------------------------- comparing


def position(index: tuple[int, ...]) -> str:
    """Return how an element is written behind its tensor's name; nothing for a scalar."""
    return str(list(index)) if index else ""


def not_finite(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the index of the first element that is NaN or infinite, None if there is none."""
    finite = torch.isfinite(tensor)
    return None if finite.all() else tuple(torch.nonzero(~finite)[0].tolist())


def mismatch(message: str) -> Result:
    """Return the result of two tensors that no tolerance makes equal."""
    return Result(False, inf, inf, inf, inf, message)


def other_type(actual: torch.Tensor, reference: torch.Tensor) -> str:
    """Return a message if two tensors of one shape differ in dtype, nothing otherwise."""
    if actual.shape != reference.shape or actual.dtype == reference.dtype:
        return ""
    return f": its type is {actual.dtype}, expected {reference.dtype}".replace("torch.", "")


def compare_without_tolerance(
    a: torch.Tensor, r: torch.Tensor, error: torch.Tensor, floor: float, names: tuple[str, str]
) -> Result | None:
    """Return the result of values that are not finite, equal, or zero but for rounding; None for others."""
    for name, tensor in zip(names, (r, a), strict=True):
        if (index := not_finite(tensor)) is not None:
            values = f"{names[0]} {r[index].item():.9g}, {names[1]} {a[index].item():.9g}"
            return mismatch(f"{position(index)}: {values}: not finite in the {name} run")
    if not error.any():
        unused = floor > 0 and not r.any()
        return Result(True, message="zero in both runs, not compared" if unused else "")
    if max(a.abs().max(), r.abs().max()) <= floor:
        return Result(True, message="zero but for rounding in both runs, not compared")
    return None


def compare_tensor(
    actual: torch.Tensor,
    reference: torch.Tensor,
    tolerance: Tolerance = DEFAULTS,
    eps: float = 0.0,
    on_top: Allowance = NOTHING_MORE,
    names: tuple[str, str] = ("reference", "actual"),
) -> Result:
    """Compare two tensors, element by element and by the norm of their difference.

    eps is the unit, by default the coarser of the tensors' own; whole numbers must be equal. An element
    near zero may be the sum of larger terms and carry their rounding error: that is why the default atol
    follows from the largest magnitude. With an rtol or atol and no norm_eps, only elements are judged.
    names: what reference and actual are called in the message.
    """
    if actual.shape != reference.shape:
        return mismatch(f": its shape is {list(actual.shape)}, expected {list(reference.shape)}")
    a, r = wide(actual), wide(reference)
    error = (a - r).abs()
    if (result := compare_without_tolerance(a, r, error, on_top.floor, names)) is not None:
        return result

    own = eps_of(actual, reference)
    eps = (eps or own) if own else 0.0
    by_default = tolerance.rtol is None and tolerance.atol is None
    bound = bound_of(eps, r.dim(), None)
    rtol = ELEMENT_EPS / NORM_EPS * bound * eps if tolerance.rtol is None else tolerance.rtol
    atol = rtol * r.abs().max() if tolerance.atol is None else tolerance.atol
    norm_eps = tolerance.norm_eps if tolerance.norm_eps is not None else bound if by_default else inf
    more, more_norm = on_top.element, on_top.norm
    if on_top.only_by_default and tolerance.rtol is not None:
        more, more_norm = 0.0, 0.0

    # The criterion. It asks for "<=" of finite numbers: values near the largest float overflow to
    # infinity, which is not below infinity.
    distance, norm = error.norm().item(), r.norm().item()
    allowed = atol + rtol * r.abs() + more
    allowed_norm = norm_eps * eps * norm + more_norm if norm_eps < inf else inf
    wrong = ~((error <= allowed) & torch.isfinite(allowed))
    passed = bool(not wrong.any() and distance <= allowed_norm)

    unit = eps or 1.0
    whole = norm if on_top.relative_to is None else on_top.relative_to
    relative = distance / unit / (whole or 1.0)
    score = max(
        (error / allowed).nan_to_num(nan=0.0).max().item(), distance / allowed_norm if allowed_norm else inf
    )
    needed = needed_tolerance(error, r, tolerance.atol, unit, on_top)
    if passed:
        return Result(True, score, relative, *needed)
    worst = int((error - allowed).nan_to_num(nan=inf).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), r.shape))
    message = (
        f"{position(index)}: {names[0]} {r[index].item():.9g}, {names[1]} {a[index].item():.9g}, difference "
        f"{error[index]:.3g}, allowed {allowed[index]:.3g}; {int(wrong.sum())} "
        f"of {r.numel()} elements differ, the norm by {relative:.3g} eps"
    )
    return Result(False, score, relative, *needed, message)


def needed_tolerance(
    error: torch.Tensor, reference: torch.Tensor, atol: float | None, eps: float, on_top: Allowance
) -> tuple[float, float]:
    """Return the smallest rtol and norm_eps under which an error would pass, inf if none would do.

    They would be given explicitly, and so do not count on what is allowed by default only.
    """
    more, more_norm = (0.0, 0.0) if on_top.only_by_default else (on_top.element, on_top.norm)
    magnitude = reference.abs() if atol is not None else reference.abs() + reference.abs().max()
    rtol = (error - more - (atol or 0.0)).clamp(min=0) / magnitude
    norm, distance = reference.norm().item(), error.norm().item()
    norm_eps = max(0.0, distance - more_norm) / (eps * norm) if norm else inf
    return rtol.nan_to_num(nan=0.0, posinf=inf).max().item(), norm_eps
