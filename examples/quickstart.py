"""Ask the same kind of question twice: the second answer drafts from the first, and every token is verified.

python examples/quickstart.py
"""

from precedent import ChatPrecedent, SpeculationCache

with SpeculationCache.open() as cache:  # in memory; give a folder to keep it
    llm = ChatPrecedent(model="smollm2-135m-instruct", speculation_cache=cache, max_tokens=80)
    for order in ("W1042", "W2377"):
        answer = llm.invoke(f"Write one polite sentence that confirms the return of order {order}.")
        stats = answer.response_metadata["speculation"]
        print(answer.text)
        print(
            f"  {answer.usage_metadata['output_tokens']} tokens in {stats['num_steps']} target forwards, "
            f"accepted from {stats['accepted_by_source'] or 'nobody'}\n"
        )
