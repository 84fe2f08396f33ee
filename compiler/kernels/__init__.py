"""From specs to machine code: what kernels compute, the templates that write them in TIR, LLVM and the linker."""
