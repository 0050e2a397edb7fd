"""A job named on the command line in place of its checkpoints' URI. Which cluster knows it, and how, is no matter of
this distribution: another one finds it, by an entry point of the group `stepfast.jobs`.

Such an entry point is a function of a job's name, its namespace and a kubeconfig's context (both may be None: the
current ones), and returns the URI of the job's folder, or raises a StepfastError.
"""

from __future__ import annotations

from importlib.metadata import entry_points

from stepfast.errors import SpecError

GROUP = "stepfast.jobs"


def uri_of(target: str, namespace: str | None, context: str | None) -> str:
    """The URI that the command line names: the target itself, or with a namespace or a context that of the job of this
    name. Raises SpecError, and what the entry point raises.
    """
    if namespace is None and context is None:
        return target
    finders = sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    if not finders:
        option = "--namespace" if namespace is not None else "--context"
        raise SpecError(
            option,
            "names a job in a cluster, and nothing is installed that could find it: pip install "
            '"stepfast-operator[cluster]", or give the URI of its checkpoints',
        )
    if "/" in target:
        raise SpecError("JOB", f"{target} is no job's name: leave out --namespace and --context for a path or a URI")
    uri: str = finders[0].load()(target, namespace, context)
    return uri
