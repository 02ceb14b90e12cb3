"""Which system calls code in a sandbox may not make: a seccomp filter, as the kernel's BPF program.

Everything that Linux has added since 5.0 answers "not implemented", as a kernel of that age would: new calls have the
same numbers on all architectures, so that later ones are closed, too. Older calls are refused one by one.
"""

from __future__ import annotations

import errno
import functools
import struct

from prefrl.errors import ConfigError

__all__ = ["number_of", "seccomp_filter"]

# The first number that was given since Linux 5.0.
_FIRST_NEW = 424

_MACHINES = ("x86_64", "aarch64")
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# The numbers are those of the machines above, in their order.
_CLOSED = {
    # Memory that no limit counts, or that outlives the process.
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "vmsplice": (278, 75),
    "bpf": (321, 280),
    # Keys, which are in no namespace.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Other processes, such as the first one of the sandbox.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    # User namespaces, in which code would have capabilities; see also clone.
    "unshare": (272, 97),
    "setns": (308, 268),
}
# These depend on an argument.
_PARTLY_CLOSED = {
    "mmap": (9, 222),
    "clone": (56, 220),
    "socket": (41, 198),
    "socketpair": (53, 199),
}

_LOAD, _IF_EQUAL, _IF_NOT_LESS, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
# Offsets in what the filter sees of a call.
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
_CLONE_NEWUSER = 0x10000000
_MAP_SHARED, _MAP_ANONYMOUS = 0x1, 0x20
# All others, such as AF_VSOCK, are in no network namespace, or of no use there.
_AF_UNIX, _AF_INET, _AF_INET6 = 1, 2, 10

# Operation, instructions to skip if true, if false, operand.
_Instruction = tuple[int, int, int, int]


def number_of(name: str, machine: str) -> int:
    """The number of a system call that the filter knows."""
    return (_CLOSED | _PARTLY_CLOSED)[name][_MACHINES.index(machine)]


@functools.cache
def seccomp_filter(machine: str) -> bytes:
    """The filter, as the array of `struct sock_filter` that `prctl` and bwrap's `--seccomp` take.

    Args:
        machine: What `platform.machine` says.

    Raises:
        ConfigError: The numbers of its system calls are not known.
    """
    if machine not in _MACHINES:
        raise ConfigError(
            f"a sandbox on this machine needs a processor of {' or '.join(_MACHINES)}, not {machine}, because the "
            "numbers of system calls differ; use RemoteSandbox(url)"
        )
    refuse = _fail(errno.EPERM)
    program: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_IF_EQUAL, 1, 0, _AUDIT_ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),  # calls of 32-bit programs have other numbers
        (_LOAD, 0, 0, _NUMBER),
        (_IF_NOT_LESS, 0, 1, _FIRST_NEW),
        _fail(errno.ENOSYS),
    ]
    blocks = {name: [refuse] for name in _CLOSED} | _blocks(refuse)
    for name, block in blocks.items():
        program += [(_IF_EQUAL, 0, len(block), number_of(name, machine)), *block]
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _blocks(refuse: _Instruction) -> dict[str, list[_Instruction]]:
    """What decides about calls that are partly closed. Each block ends in a decision."""
    allow = (_RETURN, 0, 0, _ALLOW)
    family = [
        (_LOAD, 0, 0, _argument(0)),
        (_IF_EQUAL, 3, 0, _AF_UNIX),
        (_IF_EQUAL, 2, 0, _AF_INET),
        (_IF_EQUAL, 1, 0, _AF_INET6),
        _fail(errno.EAFNOSUPPORT),
        allow,
    ]
    return {
        # Shared memory without a file stays as long as one page of it is mapped, and only what is mapped is counted.
        "mmap": [
            (_LOAD, 0, 0, _argument(3)),
            (_IF_ANY_BIT, 0, 2, _MAP_ANONYMOUS),
            (_IF_ANY_BIT, 0, 1, _MAP_SHARED),
            refuse,
            allow,
        ],
        "clone": [(_LOAD, 0, 0, _argument(0)), (_IF_ANY_BIT, 0, 1, _CLONE_NEWUSER), refuse, allow],
        "socket": family,
        "socketpair": family,
    }


def _argument(number: int) -> int:
    """The offset of its lower half, on machines that store it first."""
    return _ARGUMENTS + 8 * number


def _fail(number: int) -> _Instruction:
    return (_RETURN, 0, 0, _FAIL | number)
