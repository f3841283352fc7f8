"""Made-up logs of TorchTitan runs, and what check_run says of one."""

LOSSES = [8.1, 8.0, 7.8, 7.5, 7.3, 7.4, 7.1, 7.0, 6.9, 6.8]
OK = {
    "steps appear",
    "losses are finite",
    "gradients are finite",
    "loss falls",
    "second step is faster",
    "throughput",
    "all steps done",
    "no rank died",
}


def stamp(second: float) -> str:
    return f"2026-11-29 23:{59 if second < 0 else int(second // 60):02}:{second % 60:06.3f}".replace(".", ",")


def titan_log(losses=LOSSES, total=10, first=30.0, later=1.5, prefix="", every=1, finished=True) -> list[str]:
    """Return the lines of torchtitan 0.3.0 for a run that logs every few steps."""
    line = f"{prefix}[titan] {{}} - root - INFO - {{}}"
    lines = [
        line.format(
            stamp(1), f"Trainer is initialized with local batch size 2, total steps {total} (warmup 2)"
        ),
        line.format(stamp(2), "Training starts at step 1"),
    ]
    for i, loss in enumerate(losses):
        number = 1 if i == 0 else i * every + (0 if every > 1 else 1)
        text = (
            f"step: {number:2}  loss: {loss:8.5f}  grad_norm:  1.0315  memory:  0.79GiB(3.34%)  tps: 1,174  "
        )
        lines.append(line.format(stamp(2 + first + later * (number - 1)), text + "tflops: 0.01  mfu: 0.00%"))
    if finished:
        lines.append(line.format(stamp(59), "Training completed"))
    return lines


def quoted(result) -> str:
    """Return what is said of a death, and that nothing else is said but what was wrong before it."""
    assert result.status == 1, result.out
    first, *_, last = result.out.splitlines()
    assert first.startswith("FAIL no rank died           ") and last.startswith("FAIL "), result.out
    assert "all steps done" not in result.out
    return first[28:]
