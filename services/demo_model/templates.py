"""The question templates of the demonstration model's corpus: one set per family of phrases.

Owns the words around a phrase, nothing else. `{0}` stands for the main form of a phrase (a term
with its article, the inverted form of a reason) and `{1}` for the other one (the bare term, the
plain statement). No template may occur in both tables.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from services.demo_model.facts import Family

if TYPE_CHECKING:
    from collections.abc import Mapping

TRAINED_TEMPLATES: Mapping[Family, tuple[str, ...]] = MappingProxyType(
    {
        Family.TERM: (
            "What is {0}?",
            "What's {0}?",
            "Explain {0}.",
            "Tell me about {0}.",
            "Define {1}.",
            "What does {1} mean?",
            "What do you mean by {1}?",
            "Can you explain {0}?",
            "Describe {0}.",
            "{1}?",
            "What is meant by {1}?",
            "Please explain {0} to me.",
            "What is {0} in this project?",
            "Could you tell me what {0} is?",
            "What is the meaning of {1}?",
            "Say something about {0}.",
            "I want to understand {0}.",
            "Help me understand {1}.",
            "What should I know about {0}?",
            "{0}, what is that?",
            "How would you describe {0}?",
            "What does the word {1} stand for?",
            "Do you know what {0} is?",
            "In simple words, what is {0}?",
            "What is {0} for?",
            "What is {0} good for?",
            "What is the purpose of {0}?",
            "How does {0} work?",
            "I read about {0}, what is it?",
            "Remind me what {0} is.",
            "A few words about {0}, please.",
            "I keep hearing about {1}, explain it.",
        ),
        Family.QUANTITY: (
            "What is {0}?",
            "Tell me {0}.",
            "Do you know {0}?",
            "Give me {0}.",
            "I need {0}.",
            "Can you tell me {0}?",
            "Please state {0}.",
            "What's {0}?",
            "{0}?",
            "I want to know {0}.",
            "Could you give me {0}?",
            "What would be {0}?",
            "Please tell me {0}.",
            "Look up {0}.",
            "I am looking for {0}.",
            "Which figure do you have for {0}?",
        ),
        Family.ACTION: (
            "How do I {0}?",
            "How can I {0}?",
            "How does one {0}?",
            "Which command do I need to {0}?",
            "What do I type to {0}?",
            "I want to {0}.",
            "Show me how to {0}.",
            "How to {0}?",
            "Tell me how to {0}.",
            "What must I do to {0}?",
            "What is the way to {0}?",
            "Can I {0}?",
            "Please explain how to {0}.",
            "What is the command to {0}?",
            "Is it possible to {0}?",
            "I would like to {0}, how?",
            "How would I {0}?",
            "What do I need to {0}?",
        ),
        Family.EVENT: (
            "What happens when {0}?",
            "What happens if {0}?",
            "What if {0}?",
            "{0}, what now?",
            "What does the pod do when {0}?",
            "Suppose {0}, what then?",
            "And if {0}?",
            "Tell me what happens when {0}.",
            "Is it a problem when {0}?",
            "What follows when {0}?",
            "How does the pod react when {0}?",
            "Explain what happens when {0}.",
            "What is done when {0}?",
            "What should I expect when {0}?",
            "Let us say {0}. What happens?",
            "What comes next if {0}?",
        ),
        Family.REASON: (
            "Why {0}?",
            "Tell me why {1}.",
            "What is the reason that {1}?",
            "Explain why {1}.",
            "How come {1}?",
            "For what reason {0}?",
            "Can you say why {1}?",
            "I wonder why {1}.",
            "Do you know why {1}?",
            "What is the reason why {1}?",
            "And why {0}?",
            "Please explain why {1}.",
            "I want to know why {1}.",
            "Why is it that {1}?",
        ),
    }
)

UNSEEN_TEMPLATES: Mapping[Family, tuple[str, ...]] = MappingProxyType(
    {
        Family.TERM: (
            "Please give me an idea of {0}.",
            "Give me a short definition of {1}.",
            "I never heard of {1}, what is it?",
            "Somebody mentioned {0}, can you tell me more?",
            "Would you mind explaining {0}?",
        ),
        Family.QUANTITY: (
            "I forgot {0}, what was it?",
            "Remind me of {0}.",
            "Let me know {0}.",
            "Can you look up {0}?",
        ),
        Family.ACTION: (
            "What is the easiest way to {0}?",
            "I am trying to {0}, what do I do?",
            "Could you help me {0}?",
            "I have to {0}, which line do I enter?",
        ),
        Family.EVENT: (
            "Imagine that {0}. What comes then?",
            "Should I worry when {0}?",
            "Does it matter if {0}?",
            "What are the consequences when {0}?",
        ),
        Family.REASON: (
            "Could you explain to me why {1}?",
            "I do not understand why {1}.",
            "Give me the reason why {1}.",
        ),
    }
)
