"""Where memory and time go in a training job: predicted without a device, or measured on one."""

from stepfast.torch.anatomy.attention import Attention
from stepfast.torch.anatomy.devices import DEVICES, Device
from stepfast.torch.anatomy.html import html_report
from stepfast.torch.anatomy.live import measure
from stepfast.torch.anatomy.meter import Meter
from stepfast.torch.anatomy.parallel.plan import Parallel, Sharing
from stepfast.torch.anatomy.prediction import predict
from stepfast.torch.anatomy.report import Report, from_json
from stepfast.torch.anatomy.setting import TODAY, TORCH_1_10, Precision, Release
from stepfast.torch.anatomy.summary import print_gpu_utilization, print_summary, summary

__all__ = [
    "DEVICES",
    "TODAY",
    "TORCH_1_10",
    "Attention",
    "Device",
    "Meter",
    "Parallel",
    "Precision",
    "Release",
    "Report",
    "Sharing",
    "from_json",
    "html_report",
    "measure",
    "predict",
    "print_gpu_utilization",
    "print_summary",
    "summary",
]
