"""Error types of branchkv. This module imports nothing of ours, so every room may import it."""

from __future__ import annotations

__all__ = [
    "BranchKVError",
    "CompilationError",
    "InvalidArgumentError",
    "NumericalError",
    "OutOfBlocksError",
    "UnsupportedModelError",
    "UnsupportedOptionError",
]


class BranchKVError(Exception):
    """Base of every error that branchkv raises on its own account."""


class InvalidArgumentError(BranchKVError, ValueError):
    """An argument that does not fit the others.

    Attributes:
        argument: its name.
        expected: what it has to be.
        got: what it is.
    """

    def __init__(self, argument: str, expected: str, got: str) -> None:
        super().__init__(f"{argument}: expected {expected}, got {got}")
        self.argument = argument
        self.expected = expected
        self.got = got

    def __reduce__(self) -> tuple[type[InvalidArgumentError], tuple[str, str, str]]:
        return type(self), (self.argument, self.expected, self.got)


class OutOfBlocksError(BranchKVError):
    """The block budget cannot serve a request.

    Attributes:
        needed: blocks that the refused operation asked for.
        free: blocks that were free at that moment.
        total: blocks of the whole budget.
    """

    def __init__(self, needed: int, free: int, total: int) -> None:
        super().__init__(
            f"out of KV blocks: needed {needed}, free {free}, total {total}; "
            "give KVConfig more num_blocks or memory, or use fewer or shorter sequences"
        )
        self.needed = needed
        self.free = free
        self.total = total

    def __reduce__(self) -> tuple[type[OutOfBlocksError], tuple[int, int, int]]:
        return type(self), (self.needed, self.free, self.total)


class UnsupportedOptionError(BranchKVError, NotImplementedError):
    """A generation option that branchkv does not implement; names the option."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"option {option!r} is not supported: {reason}")
        self.option = option
        self.reason = reason

    def __reduce__(self) -> tuple[type[UnsupportedOptionError], tuple[str, str]]:
        return type(self), (self.option, self.reason)


class UnsupportedModelError(BranchKVError, NotImplementedError):
    """A model that branchkv cannot run; names the model and says why."""

    def __init__(self, model: str, reason: str) -> None:
        super().__init__(f"model {model} is not supported: {reason}")
        self.model = model
        self.reason = reason

    def __reduce__(self) -> tuple[type[UnsupportedModelError], tuple[str, str]]:
        return type(self), (self.model, self.reason)


class NumericalError(BranchKVError, ArithmeticError):
    """Logits or processed scores from which no token can be chosen; names prompt and step.

    Attributes:
        prompt: index of the prompt in the call.
        step: number of tokens generated before the failing choice.
    """

    def __init__(self, prompt: int, step: int, reason: str) -> None:
        super().__init__(f"prompt {prompt}, step {step}: {reason}")
        self.prompt = prompt
        self.step = step
        self.reason = reason

    def __reduce__(self) -> tuple[type[NumericalError], tuple[int, int, str]]:
        return type(self), (self.prompt, self.step, self.reason)


class CompilationError(BranchKVError, RuntimeError):
    """A kernel that cannot be compiled for a target, or not as it has to be.

    Attributes:
        kernel: the kernel and its configuration.
        target: as in ``branchkv kernels --target``.
        reason: what the compiler says.
    """

    def __init__(self, kernel: str, target: str, reason: str) -> None:
        super().__init__(f"kernel {kernel} for {target}: {reason}")
        self.kernel = kernel
        self.target = target
        self.reason = reason

    def __reduce__(self) -> tuple[type[CompilationError], tuple[str, str, str]]:
        return type(self), (self.kernel, self.target, self.reason)
