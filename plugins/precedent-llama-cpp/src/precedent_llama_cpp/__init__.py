"""llama.cpp as a back end: `ChatPrecedent(model="model.gguf", backend="llama.cpp")`.

`support.SUPPORT` is what the entry point names. `context` is llama.cpp through the declarations of llama-cpp-python,
`target` scores candidate trees on it. Importing this imports none of them.
"""
