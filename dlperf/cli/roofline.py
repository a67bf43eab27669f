"""``dlperf roofline``: the hierarchical roofline of kernels that Nsight Compute profiled."""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

from dlperf.cli.inputs import Answer, write_folder
from dlperf.cli.options import FORMAT, Command, common, option, output
from dlperf.core.argument_types import FORMATS, positive
from dlperf.core.streams import warn

if TYPE_CHECKING:
    from dlperf.ops.roofs import Roofs


def roofline(args: Namespace) -> Answer:
    """The kernels of a profile under the roofs of a device."""
    from dlperf.profiler import gpu_kernels
    from dlperf.report import gpu_roofline

    source, roofs, capability = _device(args)
    profile = gpu_kernels.load(args.profile, args.tensor_flops, capability)
    if capability is not None and profile.capability not in (None, capability):
        warn(
            f"{args.profile}: is of a device of compute capability {profile.capability}, and"
            f" {source} has {capability}; its roofs are another device's"
        )
    if roofs is None:
        source, roofs = "the profile", profile.roofs
    found = gpu_roofline.GpuRoofline(profile, roofs, source)
    write_folder(
        args, lambda to, force: gpu_roofline.write(found, to, args.format or FORMATS, force)
    )
    shown = (args.format or ("text",)) if args.output is None else ("text",)
    text = "\n\n".join(gpu_roofline.render(found, form) for form in shown)
    return Answer(text, found.to_json())


def _device(args: Namespace) -> tuple[str, Roofs | None, float | None]:
    """The name, the roofs and the compute capability of the device of ``--machine``."""
    if args.machine is None:
        return "", None, None
    from dlperf.cli.inputs import load_machine
    from dlperf.ops.gpu_kernels import device_roofs

    machine = load_machine(args, devices=True)
    roofs = device_roofs(machine)
    sheet = machine.data_sheet
    return machine.cpu.model, roofs, (sheet and sheet.compute_capability) or None


COMMAND = Command(
    "roofline",
    "the hierarchical roofline of GPU kernels that Nsight Compute profiled",
    options=(
        option(
            "profile",
            metavar="NCU.csv",
            help="what ncu --csv wrote, on its details page or with --page raw",
        ),
        option(
            "--tensor-flops",
            type=positive,
            metavar="N",
            help=(
                "FLOP of a tensor-core instruction, where the profile counts instructions"
                " (default: by the device; 512, as on the V100, where it is unknown)"
            ),
        ),
        FORMAT,
        output("folder to write the tables and the plot to", "DIR"),
        option(
            "--machine",
            metavar="FILE|NAME",
            help=(
                "machine, or device of the shelf such as a100, whose roofs count (default: the"
                " roofs that the profile has, if any)"
            ),
        ),
        *(one for one in common(threads=False, batch_size=False) if "--machine" not in one.flags),
    ),
    work=roofline,
    folder_answer="table",
)
