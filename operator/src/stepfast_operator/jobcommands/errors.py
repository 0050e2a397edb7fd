"""What these commands tell instead of doing something.

StepfastError
├── AskedWrong             the command line asks for what is not there, or for what may not be: exit status 2
│   ├── JobNotFound        no job of that name where was looked
│   │   └── JobDeleted     it was there, and is no more
│   └── JobRefused         the job is there, and not in a state for this
├── ClusterError           the cluster cannot be asked: exit status 1
│   └── ClusterUnknown     there is none to ask: no kubeconfig, or what asks one is not installed
└── StatusForeign          the job's status is of another version: exit status 1
"""

from __future__ import annotations

from stepfast.errors import StepfastError


class AskedWrong(StepfastError):
    """The command line asks for what is not there, or for what may not be."""


class JobNotFound(AskedWrong):
    """No job of that name. The message says where was looked, and names those that are near."""


class JobDeleted(JobNotFound):
    """The job was there, and is no more."""


class JobRefused(AskedWrong):
    """The job is not in a state for this; the message says what to do instead."""


class ClusterError(StepfastError):
    """The cluster cannot be asked. The message says what to do about it, in one line."""


class ClusterUnknown(ClusterError):
    """There is no cluster that could be asked."""


class StatusForeign(StepfastError):
    """The job's status holds what this version of Stepfast does not know."""
