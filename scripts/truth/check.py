"""Compares the answers of `stratalloc advise` with the truth about the programs of programs.py.

usage: check.py STRATALLOC FOLDER [--markdown] [--quick]    FOLDER has NAME.pickle[.xz] and NAME.json of each program

An answer is right if its headline contains all words of one of the program's accepted lists, and the categories of its
moment are right if each is within 2 % of the truth (or 0.2 % of all live bytes). The exit code is 1 if more than one
headline in twenty is wrong.
"""

import glob
import json
import os
import subprocess
import sys

# The labels of the truth that a category of the answer has to contain, as far as its bytes are not unknown, and those
# that it may contain besides: an input is kept for the backward pass too, and a node of it makes gradients that
# nothing shows to be those of parameters if the recording ends in the pass.
CATEGORIES = {
    "parameters and buffers": (["parameters"], []),
    "gradients": (["gradients"], []),
    "optimizer state": (["optimizer state"], []),
    "activations kept for the backward pass": (["kept for backward"], ["input", "logits"]),
    "activations recomputed in the backward pass": (["kept for backward"], []),
    "communication buffers": (["communication"], []),
    "copies of autocast": (["copies of autocast"], []),
    "KV cache": (["KV cache"], []),
    "workspace": (["workspace"], []),
    "activations": ([], ["kept for backward", "temporary", "logits", "micro-batches"]),
    "temporary": ([], ["temporary", "communication"]),
    "optimizer step": ([], ["temporary", "communication"]),
    "backward pass": ([], ["temporary"]),
}
KEPT = ["activations kept for the backward pass", "activations recomputed in the backward pass"]


def advise(program, recording, options):
    """Returns the answers of a recording, the device that is printed first as the first one."""
    command = [program, "advise", "--json", *options, recording]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        sys.exit(f"{' '.join(command)}: {done.stderr}")
    return answers


def headline(answer):
    """Returns the sentences of an answer that stand above its tables."""
    texts = [text for name, text in answer.items() if isinstance(text, str) and text.endswith(".")]
    texts += answer["remarks"] + [(answer["causes"] or {}).get("why", "")]
    return " ".join(texts)


def is_right(truth, text):
    def has(words):
        culprits = truth["culprits"]
        return all(any(one in text for one in culprits) if word == "{culprit}" else word in text for word in words)

    return any(has(words) for words in truth["accepted"])


def wrong_categories(truth, answer):
    """Returns a text for each category whose bytes differ from the truth, and the share of unknown bytes."""
    true = truth["devices"][str(answer["device"])]
    moment = next((one for one in answer["moments"] if one["moment"] == true["moment"]), None)
    if moment is None:
        return [f"no moment {true['moment']}"], 1.0
    live_bytes = true["live_bytes"]
    wrong = []
    unknown = sum(row["requested_bytes"] for row in moment["categories"] if row["category"].startswith("unknown"))
    # Activations of which the recording does not show whether they are kept.
    undecided = sum(row["requested_bytes"] for row in moment["categories"] if row["category"] == "activations")
    if abs(moment["requested_bytes"] - live_bytes) > live_bytes * 0.002:
        wrong.append(f"live {mib(moment['requested_bytes'])} of {mib(live_bytes)}")
    for row in moment["categories"]:
        name, got = row["category"], row["requested_bytes"]
        if name.startswith("unknown"):
            continue
        if name not in CATEGORIES:
            wrong.append(f"{name}: not in the table of check.py")
            continue
        least, most = [sum(true["categories"].get(label, 0) for label in labels) for labels in CATEGORIES[name]]
        slack = max((least + most) * 0.02, live_bytes * 0.002)
        open_bytes = unknown + (undecided if name in KEPT else 0)
        if not least - slack - open_bytes <= got <= least + most + slack:
            wrong.append(f"{name} {mib(got)} of {mib(least)}" + (f" to {mib(least + most)}" if most else ""))
    return wrong, unknown / max(live_bytes, 1)


def mib(size):
    return f"{size / (1 << 20):,.1f}"


def main():
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    program, folder = [word for word in sys.argv[1:] if not word.startswith("--")]
    rows, details = [], []
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with open(path) as file:
            truth = json.load(file)
        recording = next(one for one in (path[:-5] + end for end in (".pickle", ".pickle.xz")) if os.path.exists(one))
        answer = advise(program, recording, [one for one in options if one == "--quick"])[0]
        text, (wrong, unknown) = headline(answer), wrong_categories(truth, answer)
        rows.append((truth["program"], truth["cause"], is_right(truth, text), wrong, unknown))
        details.append(f"{truth['program']}: accepted {truth['accepted']}, culprits {truth['culprits']}\n    {text}")
    show(rows, "--markdown" in options)
    if "--text" in options:
        print("\n".join(details))
    right = sum(row[2] for row in rows)
    exact = sum(not row[3] for row in rows)
    print(f"\n{right} of {len(rows)} headlines are right, the categories of {exact} are within 2 %.")
    sys.exit(0 if right * 20 >= len(rows) * 19 else 1)


def show(rows, markdown):
    if markdown:
        print("| program | true cause | named | categories | unknown |\n|---|---|---|---|---|")
    for name, cause, right, wrong, unknown in rows:
        cells = [name, cause, "yes" if right else "**no**", "no: " + ", ".join(wrong) if wrong else "within 2 %" if markdown else "yes", f"{unknown:.0%}"]
        if not markdown:
            cells[1:2] = []
        print(f"| {' | '.join(cells)} |" if markdown else "  ".join(f"{cell:26}" if at == 0 else cell for at, cell in enumerate(cells)))


if __name__ == "__main__":
    main()
