"""Values of nodes by row: padded, side by side, or of some columns, and what is a view of what a pass returned."""

import pytest
import torch

from specinfer.attention.layout import PerNode, Span

SIZES = (3, 1, 2)
PADDED = torch.arange(3 * 4 * 2).view(3, 4, 2)
ROWS = [PADDED[row, :size] for row, size in enumerate(SIZES)]
FLAT = torch.cat(ROWS)
FORMS = {
    "padded": PerNode(PADDED, [Span(row, range(size)) for row, size in enumerate(SIZES)]),
    "side by side": PerNode.side_by_side(FLAT[None], SIZES),
    "columns": PerNode(
        torch.cat([PADDED[:, :1], PADDED], 1), [Span(row, range(1, 1 + size)) for row, size in enumerate(SIZES)]
    ),
}


@pytest.mark.parametrize("kind", FORMS)
def test_rows_are_views(kind):
    values = FORMS[kind]
    assert len(values) == 3
    for row, (found, wanted) in enumerate(zip(values, ROWS, strict=True)):
        assert torch.equal(found, wanted)
        assert values.row(row).untyped_storage().data_ptr() == values.values.untyped_storage().data_ptr()


@pytest.mark.parametrize("kind", FORMS)
def test_all_rows_together(kind):
    assert torch.equal(FORMS[kind].flat(), FLAT)
    padded = FORMS[kind].padded()
    assert padded.shape == (3, 3, 2)
    assert all(torch.equal(row[:size], wanted) for row, size, wanted in zip(padded, SIZES, ROWS, strict=True))


def test_nothing_is_copied_where_rows_lie_as_they_are_wanted():
    flat, even = FORMS["side by side"], PerNode.side_by_side(PADDED.view(1, 12, 2), [4] * 3)
    assert flat.flat().data_ptr() == flat.values.data_ptr()
    assert even.padded().data_ptr() == PADDED.data_ptr()
    assert PerNode(PADDED, [Span(row, range(4)) for row in range(3)]).padded().data_ptr() == PADDED.data_ptr()
    assert PerNode.of_rows([PADDED[0]]).flat().data_ptr() == PADDED.data_ptr()
    assert torch.equal(even.padded(), PADDED)


def test_passes_that_follow_each_other_are_one():
    """Each row's nodes, in order; a single pass stays what it is."""
    first, second = (PerNode.side_by_side(part.flatten(0, 1)[None], [2] * 3) for part in PADDED.split(2, 1))
    assert torch.equal(PerNode.joined([first, second]).padded(), PADDED)
    assert PerNode.joined([first]) is first


def test_a_row_may_have_none():
    values = PerNode(PADDED[:, :2], [Span(0, range(2)), Span(1, range(0)), Span(2, range(1, 2))])
    assert [len(row) for row in values] == [2, 0, 1]
    assert torch.equal(values.flat(), torch.cat([PADDED[0, :2], PADDED[2, 1:2]]))
    assert values.held == 6
    assert [len(row) for row in PerNode.of_rows([PADDED[0], None, PADDED[1, :1]])] == [4, 0, 1]


@pytest.mark.parametrize("kind", FORMS)
def test_a_part_of_each_row_is_a_view(kind):
    part = FORMS[kind].part([range(1, 3), range(1), range(0)])
    assert torch.equal(part.flat(), torch.cat([ROWS[0][1:3], ROWS[1]]))
    assert part.values is FORMS[kind].values
