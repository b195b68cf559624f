"""Ways to break the library between LangChain and the prompt, and between the answer and LangChain.

`make test-mutants` runs the LangChain tests on each of them (`run.py`), and one that no test sees is a test that is
missing. A mutant whose attribute is gone says so: move it to where its attribute went.
"""

from __future__ import annotations

from dataclasses import replace

from mutant import Mutant
from mutant_changes import (
    SAMPLING,
    all_late,
    chunks,
    completed,
    each,
    emptied,
    figures,
    first_second,
    first_twice,
    instead,
    instead_of_json,
    messages,
    never,
    one_id_for_all,
    result,
    roles_swapped,
    sampling,
    says_it_stopped,
    second_lost,
    thoughts_lost,
    two_results_swapped,
    usage_of_the_answer_alone,
    with_self,
    without,
    without_arguments,
    without_details,
    without_ids,
    without_key,
    without_old_results,
    without_usage,
)

PARSER = "precedent.langchain.answer_parser:AnswerParser"

MUTANTS: dict[str, Mutant] = {
    # the history
    "drop the system message": never("system"),
    "drop all but the last message": messages(lambda turns: turns[-1:]),
    "drop the first message": messages(lambda turns: turns[1:] or turns),
    "drop what the user said before": messages(
        lambda turns: [turn for turn in turns[:-1] if turn["role"] != "user"] + turns[-1:]
    ),
    "drop earlier answers": never("assistant"),
    "empty earlier answers": each("assistant", emptied),
    "drop earlier tool calls": each("assistant", without("tool_calls")),
    "empty the arguments of earlier calls": each("assistant", without_arguments),
    "drop malformed calls": each("assistant", without("invalid_calls")),
    "drop earlier thoughts": each("assistant", without("reasoning_content")),
    "drop tool results": never("tool"),
    "empty tool results": each("tool", emptied),
    "empty tool results of earlier turns": messages(without_old_results),
    "cut tool results": each("tool", lambda turn: {**turn, "content": turn["content"][: len(turn["content"]) // 2]}),
    "swap two tool results": messages(two_results_swapped),
    "drop tool ids": messages(lambda turns: [without_ids(turn) for turn in turns]),
    "drop the error of a failed tool": Mutant(
        "precedent.langchain.messages:_result_text", lambda original: lambda text, failed: text
    ),
    "swap user and assistant": messages(roles_swapped),
    "system messages as the user's": each("system", lambda turn: {**turn, "role": "user"}),
    "tool results as the user's": each("tool", lambda turn: {**turn, "role": "user"}),
    "drop names": messages(lambda turns: [without("name")(turn) for turn in turns]),
    "repeat the last message": messages(lambda turns: [*turns, turns[-1]]),
    "messages in reverse": messages(lambda turns: turns[::-1]),
    "read control tokens in messages": Mutant("precedent.text.control_tokens:Markers.for_input", instead(None)),
    # tools
    "drop tools from the prompt": Mutant(
        "precedent.text.prompt:render_prompt",
        lambda original: lambda tokenizer, turns, tools=None: original(tokenizer, turns),
    ),
    "drop bound tools": Mutant("precedent.langchain.tools:openai_tools", instead([])),
    "drop the last bound tool": Mutant("precedent.langchain.tools:openai_tools", result(lambda tools: tools[:-1])),
    "ignore tool_choice": Mutant("precedent.langchain.tools:tool_choice_of", instead("auto")),
    "ignore which tool was chosen": Mutant(
        "precedent.langchain.tools:tool_choice_of",
        result(lambda choice: choice if choice in ("auto", "none") else "any"),
    ),
    "ignore parallel_tool_calls": Mutant(
        "precedent.langchain.structured:AnswerRules.grammar", with_self(lambda rules: setattr(rules, "parallel", True))
    ),
    "ignore strict": Mutant(
        "precedent.langchain.structured:AnswerRules.grammar", with_self(lambda rules: setattr(rules, "strict", "auto"))
    ),
    "ignore response_format": Mutant(
        "precedent.langchain.structured:AnswerRules.grammar",
        with_self(lambda rules: setattr(rules, "response_format", None)),
    ),
    "force nothing": Mutant("precedent.langchain.structured:AnswerRules.grammar", instead(None)),
    # settings
    "drop a stop string": Mutant(SAMPLING, result(lambda params: replace(params, stop=params.stop[1:]))),
    "drop all stop strings": sampling(stop=()),
    "ignore the seed": sampling(seed=None),
    "ignore the temperature": sampling(temperature=0.0),
    "ignore top_k": sampling(top_k=0),
    "ignore max_tokens": sampling(max_tokens=512),
    "ignore logprobs": sampling(logprobs=None),
    "ignore the tenant": Mutant("precedent.langchain.tenants:tenant_of", instead("default")),
    "ignore the run's metadata": Mutant("precedent.langchain.runs:run_metadata", instead({})),
    "ignore speculation settings": Mutant("precedent.langchain.arguments:speculation_config", instead(None)),
    "ignore the prediction": Mutant("precedent.langchain.arguments:prediction_text", instead(None)),
    "ignore templates": Mutant("precedent.langchain.settings:templates_of", instead(())),
    "drop unknown arguments": Mutant(
        "precedent.langchain.synonyms:translated",
        lambda original: (
            lambda given, known, *others: original(
                {name: value for name, value in given.items() if name in known}, known, *others
            )
        ),
    ),
    "ignore another model": Mutant(
        "precedent.langchain.fields:EngineFields._engine_of", lambda original: lambda self, kwargs: self.engine
    ),
    "recall without a query": Mutant("precedent.text.query:recall_query", instead("")),
    # the answer
    "lose a chunk": chunks(second_lost),
    "swap two chunks": chunks(first_second),
    "repeat a chunk": chunks(first_twice),
    "stream nothing before the end": chunks(all_late),
    "give all calls one id": chunks(one_id_for_all),
    "lose thoughts": chunks(thoughts_lost),
    "repair calls that were cut": Mutant("precedent.text.tool_formats.seal:seal_of", instead("")),
    "drop usage": figures(without_usage),
    "count no prompt tokens": figures(usage_of_the_answer_alone),
    "drop the details of usage": figures(without_details),
    "hide that an answer was cut": figures(says_it_stopped),
    "drop the model's name": figures(without_key("model_name")),
    "drop the figures of speculation": figures(without_key("speculation")),
    "drop what a grammar left out": figures(without_key("grammar")),
    "go on when a stream was left": Mutant("precedent.engine.engine:Generation.cancel", instead(None)),
    # structured output
    "complete structured output that was cut": Mutant("precedent.langchain.structured_output:structured", completed),
    "parse structured output as nothing": Mutant(f"{PARSER}._whole", instead(None)),
    "read structured output that was cut": Mutant(
        f"{PARSER}._whole",
        lambda original: lambda parser, message: original(parser, message.model_copy(update={"response_metadata": {}})),
    ),
    "parse structured output loosely": Mutant(f"{PARSER}._json", instead_of_json),
    # around a call
    "mix up the answers of two models": Mutant("precedent.langchain.serializing:identifying_params", instead({})),
    "learn from every run": Mutant("precedent.langchain.middleware:ended_well", instead(True)),
    "say nothing to tracing": Mutant("precedent.langchain.telemetry:describe_result", instead(None)),
    "record calls without their history": Mutant(
        "precedent.langchain.recording:plain_messages", result(lambda plain: plain[-1:])
    ),
    "record calls without tools": Mutant("precedent.langchain.recording:plain_tools", instead([])),
}
