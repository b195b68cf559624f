"""A small translation pair trained from scratch: its language, its training, and what relaxed acceptance does to it."""
