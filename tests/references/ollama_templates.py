"""Has Go itself render templates for Ollama: writes tests/data/ollama_templates.json.

usage: python tests/references/ollama_templates.py    with go and tests/ on the paths
"""

import json
import subprocess
import tempfile
from pathlib import Path

from support.tiny_tokenizer import tiny_tokenizer

from qlora_wgpu.config.paths import BUILT_IN_CHAT_TEMPLATES
from qlora_wgpu.data.chat_template import ChatTemplate, built_in_template
from qlora_wgpu.data.ollama import PROBES, ollama_template
from qlora_wgpu.data.prompts import PromptFormat

PROGRAM = """\
package main

import (
	"bytes"
	"encoding/json"
	"os"
	"text/template"
)

type Message struct{ Role, Content string }
type Case struct {
	Template string
	Messages []Message
}

func main() {
	var cases []Case
	if err := json.NewDecoder(os.Stdin).Decode(&cases); err != nil {
		panic(err)
	}
	texts := []string{}
	for _, each := range cases {
		var text bytes.Buffer
		parsed := template.Must(template.New("").Parse(each.Template))
		if err := parsed.Execute(&text, map[string]any{"Messages": each.Messages}); err != nil {
			panic(err)
		}
		texts = append(texts, text.String())
	}
	json.NewEncoder(os.Stdout).Encode(texts)
}
"""
OUT = Path(__file__).parents[1] / "data/ollama_templates.json"


def in_go(name):
    tokenizer = tiny_tokenizer()
    template = ChatTemplate(built_in_template(name, tokenizer), tokenizer.special_tokens)
    return ollama_template(PromptFormat("chat", tokenizer, template))


def main():
    sources = {name: in_go(name) for name in BUILT_IN_CHAT_TEMPLATES}
    cases = [
        {"Template": source, "Messages": [{k.title(): v for k, v in m.items()} for m in messages]}
        for source in sources.values()
        for messages in PROBES
    ]
    with tempfile.TemporaryDirectory() as place:
        program = Path(place) / "render.go"
        program.write_text(PROGRAM)
        done = subprocess.run(
            ["go", "run", program], input=json.dumps(cases), capture_output=True, text=True,
            check=True,
        )  # fmt: skip
    texts = iter(json.loads(done.stdout))
    recorded = {
        name: {"template": source, "texts": [next(texts) for _ in PROBES]}
        for name, source in sources.items()
    }
    OUT.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
