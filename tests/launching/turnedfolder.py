"""A job's folder that a script turns to what takes nothing, and back, while an agent writes on."""

from __future__ import annotations

from pathlib import Path

# At once: what is gone for a moment the agent would make anew.
TURN = """
def turn(job, target):
    from pathlib import Path
    link = Path("link")
    link.symlink_to(Path(target).absolute())
    link.replace(job)
"""


def lay_turned(job: Path, folder: Path) -> None:
    """Makes the job's folder a link: to `folder` in that folder, beside which is `file`, into which nothing can go.
    Scripts that have TURN run there.
    """
    (folder / "file").touch()
    (folder / "folder").mkdir()
    job.parent.mkdir(parents=True)
    job.symlink_to(folder / "folder")
