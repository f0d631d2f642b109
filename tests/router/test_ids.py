"""Names that are drawn many at once are as different as if each were drawn alone."""

from __future__ import annotations

import re

from router import ids


def test_ids_are_different_and_have_one_form() -> None:
    found = [ids.new_id() for _ in range(1000)]
    assert len(set(found)) == 1000
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in found)
