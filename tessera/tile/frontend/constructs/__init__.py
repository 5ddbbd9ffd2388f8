"""What each construct of Python becomes, one file per family; importing this fills the tables."""

from __future__ import annotations

from tessera.tile.frontend.constructs import assignments as assignments
from tessera.tile.frontend.constructs import calls as calls
from tessera.tile.frontend.constructs import conditions as conditions
from tessera.tile.frontend.constructs import literals as literals
from tessera.tile.frontend.constructs import loops as loops
from tessera.tile.frontend.constructs import names as names
from tessera.tile.frontend.constructs import operators as operators
from tessera.tile.frontend.constructs import ranges as ranges
from tessera.tile.frontend.constructs import statements as statements
from tessera.tile.frontend.constructs import subscripts as subscripts
