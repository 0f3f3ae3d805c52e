"""The search for operands whose address nobody wrote, on a few lines of a listing."""

import pytest
from machine_code import lost_operands

# UR6 is an address, UR7 is not; UR10 is the second factor's
LISTING = """
        /*0000*/                   UIADD3 UR6, UR52, 0xc000, URZ ;
        /*0010*/                   ULDC UR7, c[0x0][0x288] ;
        /*0020*/              @!P1 BRA `(.L_x_1) ;
        /*0030*/                   {made} ;
.L_x_1:
        /*0040*/                   {used} ;
        /*0050*/                   HGMMA.64x32x16.F32 R120, R88, gdesc[UR8].tnspB, R120 ;
        /*0060*/                   EXIT ;
"""
START = "        /*fff0*/                   ULEA UR52, UR4, UR5, 0x18 ;"


@pytest.mark.parametrize(
    ("made", "used", "lost"),
    [
        ("NOP", "UIADD3 UR10, UP0, UR6, 0x40, URZ", []),
        ("NOP", "UIADD3 UR10, UP0, UR11, 0x40, URZ", ["0050"]),  # nobody wrote it
        ("UMOV UR11, UR6", "UIADD3 UR10, UP0, UR11, 0x40, URZ", ["0050"]),  # on one path nobody
        ("NOP", "UIADD3 UR10, UP0, UR7, 0x40, URZ", ["0050"]),  # a parameter
        ("NOP", "R2UR UR10, R244", ["0050"]),
    ],
    ids=["made", "never", "on one path", "parameter", "register"],
)
def test_address_is_followed_to_who_made_it(made, used, lost):
    assert lost_operands(START + LISTING.format(made=made, used=used)) == lost


@pytest.mark.parametrize(("offset", "lost"), [(0x20, []), (0x28, ["0050"])])
def test_address_is_followed_through_the_stack(offset, lost):
    start = """
        /*fff0*/                   ULEA UR52, UR4, UR5, 0x18 ;
        /*fff1*/                   UIADD3 UR6, UR52, 0xc000, URZ ;
        /*fff2*/                   IMAD.U32 R14, RZ, RZ, UR6 ;
        /*fff3*/                   STL.64 [R1+0x20], R14 ;
        /*fff4*/                   LDL.64 R244, [R1+{}] ;"""
    listing = start.format(hex(offset)) + LISTING.format(made="NOP", used="R2UR UR10, R244")
    assert lost_operands(listing) == lost
