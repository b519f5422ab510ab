"""The application for Ray Serve, where its config files find it.

    applications:
      - name: slipstream
        import_path: slipstream.ray_serve:build
        args: {target: meta-llama/Llama-3.1-8B, drafter: meta-llama/Llama-3.2-1B, replicas: 2}

The arguments are flags of `slipstream serve`, without the dashes in front (docs/cluster.md).
"""

import sys
from typing import Any

from slipstream.finding import ROOT, claim_names


def build(args: dict[str, Any]) -> Any:
    """Return the application. Raises ConfigurationError: a setting is wrong.

    args  settings by flag; a flag that may be given several times has a list
    """
    claim_names()
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))  # `deploy`; the other names here stay the program's own
    from deploy.serve_app import built

    return built(args)
