"""A LangChain agent on a hybrid model, with a warm cache: the second run drafts from what the first one said.

    python examples/hybrid_agent.py                             # a tiny random Qwen3.5, built here: no download
    python examples/hybrid_agent.py --model Qwen/Qwen3.5-4B     # a real one

Every node of a candidate tree gets the recurrent state of its own path, so answers are those of plain decoding. A
random model says nothing sensible, and calls no tool; what it prints are the counts.
"""

import argparse
import tempfile
from pathlib import Path

from langchain.agents import create_agent
from langchain_core.tools import tool
from transformers import AutoConfig, AutoModelForCausalLM, set_seed

from precedent import ChatPrecedent
from precedent_testing.tiny_models import byte_tokenizer


@tool
def order_status(order_id: str) -> str:
    """Look up the status of an order."""
    return f'{{"order_id": "{order_id}", "status": "shipped"}}'


def tiny_hybrid(folder: Path) -> Path:
    """Write a random Qwen3.5: two layers with a recurrent state, two with attention."""
    set_seed(0)
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=8192,
        eos_token_id=258,
        bos_token_id=256,
        pad_token_id=256,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def main() -> None:
    """Ask the same question twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face id or folder; by default a tiny random hybrid")
    model = parser.parse_args().model
    with tempfile.TemporaryDirectory() as folder:
        llm = ChatPrecedent(
            model=model or str(tiny_hybrid(Path(folder))),
            speculation_cache=str(Path(folder) / "cache"),
            max_tokens=60,
        )
        agent = create_agent(llm, tools=[order_status], name="orders")
        for run in ("cold", "warm"):
            answer = agent.invoke({"messages": [("user", "What is the status of order W1042? Use the tool.")]})
            counts = answer["messages"][-1].response_metadata["speculation"]
            print(f"{run}: {counts['tokens_per_step']:.2f} tokens per step")


if __name__ == "__main__":
    main()
