from __future__ import annotations

import gc

import pytest

from cluster.garbage import permanent_objects


def test_what_is_made_inside_is_never_looked_at_again() -> None:
    before = gc.get_freeze_count()
    with permanent_objects():
        assert not gc.isenabled()
        made = [[index] for index in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + 1000
    assert not {id(each) for each in made} & {id(each) for each in gc.get_objects()}
    gc.unfreeze()


def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError), permanent_objects():
        raise ImportError
    assert gc.isenabled()
    gc.unfreeze()
