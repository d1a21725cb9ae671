"""A Triton backend for the CPU, which compiles nothing: Triton's interpreter runs every kernel."""
