"""`python -m tests.find_draws`: write draws.json anew, for the recipes that it names and the given.

python -m tests.find_draws ["tiny llama 0 199" | "family gemma3_text"]...
"""

import json
import sys

from tests.draws import STORE, stored
from tests.test_draws import found

names = sorted({*stored(), *sys.argv[1:]})
STORE.write_text(json.dumps({name: found(name) for name in names}, indent=1) + "\n")
