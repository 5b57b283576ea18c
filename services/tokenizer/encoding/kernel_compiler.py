"""Compiles the kernels with numba, for the processor that `NUMBA_CPU_NAME` names or that this process runs on."""

from __future__ import annotations

from typing import Any

from numba import typeof, types

from services.tokenizer.encoding.chunk_kernel import encode_documents, rehash
from services.tokenizer.encoding.machine_code import MachineCode, argument_types, flatten

KERNELS = {"encode_documents": encode_documents, "rehash": rehash}


def compile_kernel(name: str, arguments: tuple[Any, ...]) -> MachineCode:
    """Compile a kernel for arguments of these types."""
    types_of_arguments = tuple(
        types.int64 if isinstance(value, int) else typeof(value)  # type: ignore[no-untyped-call]
        for value in arguments
    )
    kernel = KERNELS[name]
    kernel.compile(types_of_arguments)
    compiled = kernel.overloads[types_of_arguments]
    _, _, (object_file, _) = compiled.library.serialize_using_object_code()
    return MachineCode(compiled.fndesc.llvm_func_name, argument_types(flatten(arguments)), object_file)
