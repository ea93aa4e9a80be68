"""Asks the exported model held-out questions, through transformers, in fp32 and greedily.

It is given the exported folder, the training folder for the validation book, and a test seed.
It promises `evals.json`: right answers of each skill, replies to the demo, loss on the book.
"""

import argparse
import json
import math
import re
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from recipes.tiny.skills import DEMO, SKILLS, Example, examples
from recipes.tiny.train import Corpus
from transformers import AutoModelForCausalLM, AutoTokenizer

TEST_SEED = 1_000_003


class Chat:
    """The exported model with its tokenizer, answering as a server would."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def ask(self, prompt: str, before: tuple[tuple[str, str], ...] = ()) -> str:
        """The greedy reply to a prompt after the earlier turns."""
        turns = [text for turn in before for text in turn] + [prompt]
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
        inputs = self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = self.model.generate(**inputs, max_new_tokens=200, do_sample=False)
        reply = output[0, inputs["input_ids"].shape[1] :]
        return self.tokenizer.decode(reply, skip_special_tokens=True)


def questions(skill: str, seed: int, num_questions: int) -> list[Example]:
    """Distinct held-out questions; a skill with few phrasings may have fewer than asked for."""
    stream = islice(examples(seed, held_out=True, skill=skill), 40 * num_questions)
    return list({example.asked: example for example in stream}.values())[:num_questions]


def score_skills(chat: Chat, seed: int, num_questions: int) -> dict[str, dict]:
    """Right and asked for each skill, with the first few wrong replies."""
    scores = {}
    for skill in SKILLS:
        asked = questions(skill, seed, num_questions)
        replies = [(example, chat.ask(example.prompt, example.before)) for example in asked]
        wrong = [[e.asked, reply] for e, reply in replies if not e.accepts(reply)]
        scores[skill] = {"right": len(asked) - len(wrong), "asked": len(asked), "wrong": wrong[:5]}
        print(f"{skill:10} {scores[skill]['right']:3} of {len(asked)}")
    return scores


def score_demo(chat: Chat) -> list[dict]:
    """The replies to the prompts shown to newcomers."""
    replies = []
    for prompt, pattern in DEMO.items():
        reply = chat.ask(prompt)
        right = re.fullmatch(pattern, reply, re.DOTALL) is not None
        replies.append({"prompt": prompt, "reply": reply, "right": right})
        print(f"{'right' if right else 'WRONG'} {prompt!r}: {reply!r}")
    return replies


@torch.no_grad()
def score_book(chat: Chat, path: Path, num_rows: int = 64, length: int = 256) -> dict[str, float]:
    """Nats per token and bits per byte on rows of books that were not trained on."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets, _ = Corpus.read(path).rows(num_rows, length, generator)
    loss = F.cross_entropy(chat.model(inputs).logits.flatten(0, 1), targets.flatten()).item()
    num_bytes = sum(len(text.encode()) for text in chat.tokenizer.batch_decode(targets))
    return {
        "nats_per_token": round(loss, 4),
        "bits_per_byte": round(loss / math.log(2) * targets.numel() / num_bytes, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--model", type=Path, required=True, help="exported folder")
    parser.add_argument("--questions", type=int, default=100, help="questions for each skill")
    parser.add_argument("--seed", type=int, default=TEST_SEED)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    chat = Chat(args.model)
    scores = {
        "seed": args.seed,
        "book": score_book(chat, args.out / "val.safetensors"),
        "demo": score_demo(chat),
        "skills": score_skills(chat, args.seed, args.questions),
    }
    print(scores["book"])
    (args.out / "evals.json").write_text(json.dumps(scores, indent=2) + "\n")


if __name__ == "__main__":
    main()
