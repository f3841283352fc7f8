"""What must hold in any run, whatever it trains: checked rank by rank, without a reference."""

from collections import defaultdict
from math import isfinite
from operator import is_ as is_same

import torch

from training_records import (
    LOSS,
    OUTPUT,
    Finding,
    Key,
    Place,
    Steps,
    Tensors,
    check_same_parameters,
    optimizer_of,
    place_of,
)
from training_tolerance import (
    DEFAULTS,
    NEGLIGIBLE,
    NORM_EPS,
    NOTHING_MORE,
    Tolerance,
    adaptive_slacks,
    allow_rounding_of,
    allow_slack,
    compare_tensor,
    eps_of,
    floor_of,
    largest,
    not_finite,
    other_type,
    position,
    share_of_rounding,
    unit_of,
    wide,
)

INVARIANTS = {
    "finite": "no value is NaN or infinite",
    "nonzero": "no tensor is zero throughout",
    "ranks agree": "full gradients, parameters and deltas are the same on every rank",
    "outputs": "outputs differ between data-parallel replicas and agree within one",
    "loss": "the global loss is the mean of the replicas' own losses",
    "update": "a delta is the difference of the parameters after and before the step",
    "sgd": "a delta is -learning rate x gradient",
}
HEAD = 16  # elements of an output that settle for most pairs of replicas that they differ


class InvariantChecks:
    """Check the INVARIANTS of one run, which gets its ranks one after another, rank 0's first.

    The first rank that has a tensor is rank 0 or, for outputs, the first rank of the replica. Its tensor
    is checked by itself. Every other rank's is compared with it. If Run.steps gave both ranks the same
    object, they are equal: whatever is wrong with the first one is then wrong on this rank, too.
    """

    def __init__(self, run: str, metadata: dict, tolerance: Tolerance = DEFAULTS) -> None:
        """run: what it is called in findings, actual or reference."""
        self.run, self.metadata, self.tolerance, self.texts = run, metadata, tolerance, INVARIANTS
        self.uneven = False  # whether replicas may have other numbers of samples
        self.checked = dict.fromkeys(INVARIANTS, 0)
        self.findings: list[Finding] = []
        # By rank: its replica, and of each step the global loss and the rank's own; and its weights.
        self.losses: list[tuple[int, list[tuple[float | None, float | None]]]] = []
        self._weights: list[list[float]] = []
        self._rank_0: Steps = []
        self._unit = 0.0
        self._content_0: dict = {}
        # Of the rank that is being checked; and by step, what Adam may make of rounding on it.
        self._content: dict = {}
        self._steps: Steps = []
        self._slacks: list[Tensors] = []
        self._first_ranks: dict[int, int] = {}  # by replica
        self._firsts: dict[Place, torch.Tensor] = {}
        self._not_finite: dict[Place, str] = {}  # the message about a first tensor that is not finite
        self._nonzero: dict[tuple[Key, int | None], bool] = {}
        self._heads: dict[int, torch.Tensor] = {}  # by step: first elements of outputs, a row a replica
        self._broken_updates: dict[tuple[int, str], dict[str, str]] = {}  # of rank 0, by step and name

    def failed(self, check: str) -> int:
        """Return how often an invariant was broken."""
        return sum(finding.check == self._name(check) for finding in self.findings)

    def add(self, content: dict, steps: Steps) -> None:
        """Check one rank. Raises InputError if its parameters are other ones than rank 0's."""
        metadata, records = content["metadata"], content["records"]
        rank, replica = metadata["rank"], metadata["dp_rank"]
        self._content, self._steps, self._slacks = content, steps, []
        self.losses.append((replica, [(record["loss"], record["local_loss"]) for record in records]))
        self._weights.append([record.get("weight", 1.0) for record in records])
        if rank == 0:
            self._rank_0, self._content_0, self._unit = steps, content, unit_of(steps, steps)
        else:
            check_same_parameters(self._rank_0, steps, (f"rank 0 of the {self.run} run", f"rank {rank}"))
        if replica not in self._first_ranks:
            self._check_against_other_replicas(rank, steps)
            self._first_ranks[replica] = rank
        for step, tensors in enumerate(steps):
            # A script may return no output or no loss on some ranks.
            for key in self._rank_0[step].keys() - tensors.keys() - {OUTPUT, LOSS}:
                self._fail(step, key, rank, "ranks agree", ": rank 0 has it, this rank has not")
            for key, tensor in tensors.items():
                self._check_tensor(step, key, rank, replica, tensor)
            if step:
                self._check_updates(step, rank, steps)

    @property
    def unused(self) -> set[str]:
        """The parameters whose gradient is zero at every step, as that of an expert without a token."""
        zero = {name for ((kind, name), _), any_ in self._nonzero.items() if kind == "gradients" and not any_}
        plain = {name for name in zero if optimizer_of(self._content, 1, name)[0] == "SGD"}
        return {name for name in zero if name not in plain or not self._nonzero.get((("deltas", name), None))}

    def finish(self, unused: set[str] = frozenset()) -> list[Finding]:
        """Check what takes all ranks, and return everything found. unused: parameters that may be so."""
        for step in range(1, len(self._rank_0)):
            self._check_losses(step)
        self._check_nonzero(unused)
        return self.findings

    def _name(self, check: str) -> str:
        return f"{check} ({self.run} run)"

    def _fail(self, step: int, key: Key, rank: int, check: str, message: str) -> None:
        self.findings.append(Finding(step, rank, *key, self._name(check), message))

    # ------------------------------------------------------------ one tensor

    def _check_tensor(self, step: int, key: Key, rank: int, replica: int, tensor: torch.Tensor) -> None:
        place = place_of(step, key, replica)
        first = self._firsts.get(place)
        if first is None and (rank == 0 or key in (OUTPUT, LOSS)):
            self._firsts[place] = tensor
            if message := self._check_values(place, rank, tensor):
                self._not_finite[place] = message
            return
        if first is None:
            self._fail(step, key, rank, "ranks agree", ": this rank has it, rank 0 has not")
            return
        if key != LOSS:
            self.checked["outputs" if key == OUTPUT else "ranks agree"] += 1
        if tensor is first:
            if place in self._not_finite:
                self._fail(step, key, rank, "finite", self._not_finite[place])
        elif not self._check_values(place, rank, tensor) and key != LOSS and place not in self._not_finite:
            self._check_agreement(step, key, rank, tensor, first)

    def _check_values(self, place: Place, rank: int, tensor: torch.Tensor) -> str:
        # Returns what is wrong, nothing if all values are finite.
        step, key, replica = place
        self.checked["finite"] += 1
        values = wide(tensor)
        self._nonzero[key, replica] = self._nonzero.get((key, replica), False) or bool(values.any())
        index = not_finite(values)
        if index is None:
            return ""
        message = f"{position(index)}: it is {values[index].item()}"
        self._fail(step, key, rank, "finite", message)
        return message

    def _check_agreement(
        self, step: int, key: Key, rank: int, tensor: torch.Tensor, first: torch.Tensor
    ) -> None:
        kind, name = key
        check = "outputs" if key == OUTPUT else "ranks agree"
        if problem := other_type(tensor, first):
            self._fail(step, key, rank, check, problem)
            return
        on_top = NOTHING_MORE
        if kind == "deltas":
            on_top = allow_rounding_of(self._rank_0[step]["parameters", name], eps_of(tensor, first))
        if kind in ("gradients", "deltas"):
            on_top = on_top._replace(floor=share_of_rounding(self._unit) * largest(self._rank_0[step], kind))
        if kind in ("parameters", "deltas"):
            on_top = allow_slack(on_top, self._slack_of(step, key))
        names = "an earlier rank", "this rank"
        result = compare_tensor(tensor, first, self.tolerance, self._unit, on_top, names)
        if not result.passed:
            self._fail(step, key, rank, check, result.message)

    def _slack_of(self, step: int, key: Key) -> torch.Tensor | None:
        if not self._slacks:
            self._slacks, _ = adaptive_slacks(self._content_0, self._rank_0, self._steps, self._unit)
        return self._slacks[step].get(key)

    # ------------------------------------------------------------ the update of a step

    def _check_updates(self, step: int, rank: int, steps: Steps) -> None:
        for kind, name in list(steps[step]):
            if kind == "deltas":
                for check, message in self._broken_update(step, rank, name, steps).items():
                    self._fail(step, ("deltas", name), rank, check, message)
            elif kind == "parameters" and ("deltas", name) not in steps[step]:
                before, after = steps[step - 1][kind, name], steps[step][kind, name]
                if not torch.equal(before, after):
                    message = ": it changes, though it has no gradient"
                    self._fail(step, (kind, name), rank, "update", message)

    def _broken_update(self, step: int, rank: int, name: str, steps: Steps) -> dict[str, str]:
        # Returns a message for each check that fails.
        before, after, delta, gradient = update_of(steps, step, name)
        if rank and all(map(is_same, update_of(self._rank_0, step, name), (before, after, delta, gradient))):
            return self._broken_updates[step, name]
        broken = {}
        if all(not_finite(wide(tensor)) is None for tensor in (before, after, delta, gradient)):
            expected = {"update": wide(after) - wide(before)}
            optimizer, rate = optimizer_of(self._content, step, name)
            if optimizer == "SGD":
                expected["sgd"] = -rate * wide(gradient)
            for check, value in expected.items():
                self.checked[check] += 1
                # One subtraction and one product: no tolerance that was given for the runs applies.
                on_top = allow_rounding_of(after, eps_of(delta, value))
                result = compare_tensor(
                    delta, value, eps=self._unit, on_top=on_top, names=("expected", "actual")
                )
                if not result.passed:
                    broken[check] = result.message
        if rank == 0:
            self._broken_updates[step, name] = broken
        return broken

    # ------------------------------------------------------------ what takes several ranks

    def _check_against_other_replicas(self, rank: int, steps: Steps) -> None:
        for step, tensors in enumerate(steps[1:], start=1):
            output = tensors.get(OUTPUT)
            others = [self._firsts.get((step, OUTPUT, replica)) for replica in self._first_ranks]
            # The first elements, of all replicas at once, settle it for nearly all pairs. A replica without
            # an output has NaN there, which is near to nothing.
            head = torch.full((1, HEAD), torch.nan, dtype=torch.float64)
            if output is not None:
                head = torch.zeros(1, HEAD, dtype=wide(output).dtype)
                head[0, : output.numel()] = wide(output.reshape(-1)[:HEAD])
            heads = self._heads.get(step, head[:0])
            self._heads[step] = torch.cat([heads, head])
            if output is None:
                continue
            self.checked["outputs"] += len(others)
            message = None
            if others and others[0] is not None and output.shape != others[0].shape and not self.uneven:
                replica = next(iter(self._first_ranks))
                shapes = f"{list(output.shape)}, replica {replica}'s {list(others[0].shape)}"
                message = f": its shape is {shapes}"
            negligible = NEGLIGIBLE * wide(output).abs().max()
            near = ((heads - head).abs().amax(dim=1) <= negligible).tolist()
            for replica, other, alike in zip(self._first_ranks, others, near, strict=True):
                if message or not alike or output.shape != other.shape:
                    continue
                if (wide(output) - wide(other)).abs().max() <= negligible:
                    message = f": the same as those of replica {replica}: both got the same samples"
            if message:
                self._fail(step, OUTPUT, rank, "outputs", message)

    def _check_losses(self, step: int) -> None:
        of_ranks = [(replica, *losses[step - 1]) for replica, losses in self.losses]
        own, weights = defaultdict(list), {}  # by replica
        for rank, (replica, _, own_loss) in enumerate(of_ranks):
            if own_loss is None:
                continue
            own[replica].append(own_loss)
            weights[replica] = self._weights[rank][step - 1]
            if not isfinite(own_loss):
                self._fail(step, LOSS, rank, "finite", f": the rank's own loss is {own_loss}")
        if len(own) < len(self._first_ranks):
            return  # a replica returned no loss, and the mean over all is not known
        mean = sum(weights[replica] * sum(values) / len(values) for replica, values in own.items())
        mean /= sum(weights.values())
        allowed = NORM_EPS * max(self._unit, torch.finfo(torch.float32).eps) * abs(mean)
        for rank, (_, loss, own_loss) in enumerate(of_ranks):
            if loss is None or own_loss is None:
                continue
            self.checked["loss"] += 1
            if all(map(isfinite, (own_loss, loss, mean))) and not abs(loss - mean) <= allowed:
                means = f"the mean of the {len(own)} replicas' own losses is {mean:.9g}"
                self._fail(step, LOSS, rank, "loss", f": it is {loss:.9g}, {means}")

    def _check_nonzero(self, unused: set[str]) -> None:
        for (key, replica), nonzero in self._nonzero.items():
            self.checked["nonzero"] += 1
            kind, name = key
            frozen = kind == "parameters" and ("gradients", name) not in self._rank_0[1]
            if nonzero or frozen or (kind in ("gradients", "deltas") and name in unused):
                continue
            if kind == "deltas" and self._is_rounding(name):
                continue  # an update below the parameter's own rounding
            for rank, (of_rank, _) in enumerate(self.losses):
                if replica is None or replica == of_rank:
                    message = ": all zero at every step, nothing is compared"
                    self._fail(1, key, rank, "nonzero", message)
        for step, tensors in enumerate(self._rank_0[1:], start=1):
            gradients = {key: tensor for key, tensor in tensors.items() if key[0] == "gradients"}
            if not any(wide(tensor).any() for tensor in gradients.values()):
                first = next(iter(gradients))
                self._fail(step, first, 0, "nonzero", ": all gradients of this step are zero")

    def _is_rounding(self, name: str) -> bool:
        # A gradient that is zero but for rounding, such as that of a key's bias.
        for tensors in self._rank_0[1:]:
            gradient = tensors.get(("gradients", name))
            if gradient is not None and wide(gradient).abs().max() > floor_of(tensors, self._unit):
                return False
        return True


def update_of(steps: Steps, step: int, name: str) -> tuple[torch.Tensor | None, ...]:
    """Return a parameter before and after a step, its delta and its gradient; None for what there is not."""
    before = steps[step - 1].get(("parameters", name))
    return before, *(steps[step].get((kind, name)) for kind in ("parameters", "deltas", "gradients"))
