import multiprocessing
import os
import sys

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
from torch.distributed.run import parse_args, run  # noqa: E402

PRELOAD = os.environ.get("PRE", "torch.distributed.run torch.distributed.fsdp torch.distributed.tensor.parallel torch.distributed.device_mesh torch._dynamo torch._functorch.aot_autograd torch._dynamo.backends.debugging").split()


def main():
    args = parse_args(["--start-method=forkserver", "--run-path", *sys.argv[1:]])
    args.training_script = os.path.abspath(args.training_script)
    sys.path[0] = os.path.dirname(args.training_script)
    multiprocessing.set_forkserver_preload(PRELOAD)
    run(args)


if __name__ == "__main__":
    main()
