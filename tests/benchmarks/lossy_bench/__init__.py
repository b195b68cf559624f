"""The parts of `bench_lossy.py`: the desk on an engine, rejections by row, conversations, the picture."""
