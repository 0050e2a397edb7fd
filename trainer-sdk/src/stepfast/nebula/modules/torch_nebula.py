"""What `import torch_nebula` finds under a launcher of Stepfast's, which has this folder searched last."""

import stepfast.nebula.aliases  # noqa: F401  # takes this module's place
