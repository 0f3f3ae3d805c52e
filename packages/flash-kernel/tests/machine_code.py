"""Search a kernel's machine code for tensor core products that read from an address nobody wrote.

A warpgroup's product takes its operands' addresses in shared memory from uniform registers.  The
ptxas of Triton 3.6 has lost some where it needed more of them than there are: the kernel then reads
what another path, or another purpose, left in the register (docs/tuning-log.md).  So each address
is followed back through copies, additions and the stack to what made it: whatever else computes in
uniform registers is taken to make an address.  Branches to computed places are not followed.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;")
LABEL = re.compile(r"^(\.L_x_\d+):")
REGISTER = re.compile(r"-?(U?R)(\d+)(?:\.reuse)?$")
STACK = re.compile(r"\[R1(?:\+0x([0-9a-f]+))?\]$")
COPIES = ("R2UR", "UMOV", "MOV", "IMAD.U32", "IMAD.MOV.U32")
ADDITIONS = ("UIADD3", "ULOP3.LUT", "USEL")
NO_RESULT = (
    "STS", "STG", "STL", "BRA", "BAR", "SYNCS", "UTMASTG", "WARPGROUP", "EXIT", "NOP", "MEMBAR",
    "FENCE", "UISETP", "ISETP", "FSETP", "PLOP3", "UPLOP3", "RED", "REDG", "ATOMG", "R2P",
)  # fmt: skip
# what makes a parameter or a number of the computation, and never an address in shared memory
NO_ADDRESS = (
    "ULDC", "UIMAD", "S2UR", "CS2UR", "LDG", "LDS", "FADD", "FMUL", "FFMA", "HGMMA", "F2FP",
)  # fmt: skip


class Instruction(NamedTuple):
    """A line of a listing."""

    address: str
    predicate: str | None
    opcode: str
    operands: list[str]

    @property
    def name(self) -> str:
        """The opcode without its modifiers."""
        return self.opcode.partition(".")[0]


def disassemble(cubin: bytes, tools: Path) -> str:
    """Return the listing of nvdisasm."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        command = [str(tools / "nvdisasm"), "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def lost_operands(listing: str) -> list[str]:
    """Return the addresses of the products of a listing some operand of which nobody wrote."""
    code, before = parse(listing)
    lost = set()
    for index, instruction in enumerate(code):
        seen: set[tuple[int, str]] = set()
        pending = [(index, place) for place in product_operands(instruction)]
        while pending:
            at, place = pending.pop()
            if (at, place) in seen:
                continue
            seen.add((at, place))
            for source in writers(code, before, at, place):
                if source is None or code[source].name in NO_ADDRESS:
                    lost.add(instruction.address)
                else:
                    pending += [(source, x) for x in taken_from(code[source], place)]
    return sorted(lost)


def parse(listing: str) -> tuple[list[Instruction], list[list[int]]]:
    """Return the instructions, and for each those that may come just before it."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if found := LABEL.match(line.strip()):
            labels[found[1]] = len(code)
        elif found := INSTRUCTION.match(line):
            operands = [x.strip() for x in found[4].split(",")]
            code.append(Instruction(found[1], found[2], found[3], operands))
    before: list[list[int]] = [[] for _ in code]
    for index, instruction in enumerate(code):
        for following in successors(index, instruction, labels):
            if following < len(code):
                before[following].append(index)
    return code, before


def successors(index: int, instruction: Instruction, labels: dict[str, int]) -> Iterator[int]:
    """Yield what may come next."""
    is_certain = instruction.predicate is None
    if instruction.name == "BRA":
        target = re.search(r"\.L_x_\d+", instruction.operands[-1])
        if target and target[0] in labels:
            yield labels[target[0]]
        is_certain = is_certain and len(instruction.operands) == 1
    if not (is_certain and instruction.name in ("BRA", "EXIT", "RET")):
        yield index + 1


def product_operands(instruction: Instruction) -> list[str]:
    """Return where a product has the low words of its operands' addresses."""
    found = re.search(r"gdesc\[UR(\d+)\]", ",".join(instruction.operands))
    if instruction.name != "HGMMA" or not found:
        return []
    first = int(found[1])
    in_registers = instruction.operands[1].startswith("R")  # the first factor
    return [f"UR{first + 2}"] if in_registers else [f"UR{first}", f"UR{first + 2}"]


def writers(
    code: list[Instruction], before: list[list[int]], at: int, place: str
) -> set[int | None]:
    """Return which instructions may have written a place last; None: none on some path."""
    found: set[int | None] = set()
    seen, pending = set(), list(before[at])
    while pending:
        index = pending.pop()
        if index in seen:
            continue
        seen.add(index)
        if place in written(code[index]):
            found.add(index)
            if code[index].predicate is None:
                continue
        if index == 0:
            found.add(None)
        pending += before[index]
    return found


def written(instruction: Instruction) -> list[str]:
    """Return the registers and words of the stack that an instruction writes."""
    name, opcode, operands = instruction.name, instruction.opcode, instruction.operands
    words = 4 if ".128" in opcode else 2 if ".64" in opcode or ".WIDE" in opcode else 1
    if name == "STL":
        found = STACK.match(operands[0])
        return [f"stack+{int(found[1] or '0', 16) + 4 * i}" for i in range(words)] if found else []
    if name in NO_RESULT:
        return []
    if name == "HGMMA":
        words = int(re.match(r"HGMMA\.64x(\d+)x", opcode)[1]) // 2
    # a carry comes before the result
    found = next((x for x in map(REGISTER.match, operands[:2]) if x), None)
    return [f"{found[1]}{int(found[2]) + i}" for i in range(words)] if found else []


def taken_from(instruction: Instruction, place: str) -> list[str]:
    """Return where a copy or an addition takes the number from that it writes to a place."""
    operands = instruction.operands
    if instruction.name in ("LDL", "STL"):
        to_stack = instruction.name == "STL"
        address, register = operands if to_stack else operands[::-1]
        start, first = STACK.match(address), REGISTER.match(register)
        if not start or not first:
            return []
        offset, number = int(start[1] or "0", 16), int(first[2])
        if to_stack:
            return [f"R{number + (int(place.removeprefix('stack+')) - offset) // 4}"]
        return [f"stack+{offset + 4 * (int(place.removeprefix('R')) - number)}"]
    if instruction.opcode in COPIES:
        found = REGISTER.match(operands[-1])
        return [found[1] + found[2]] if found else []
    if instruction.opcode in ADDITIONS:
        sources = map(REGISTER.match, operands[1:])
        return [x[1] + x[2] for x in sources if x and x[1] == "UR"]
    return []
