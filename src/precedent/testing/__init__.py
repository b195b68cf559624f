"""Shipped for your tests and ours: contract classes, fakes, tiny real models, exact enumeration of output laws."""
