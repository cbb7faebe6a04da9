"""Which library compiles which constraint."""

from __future__ import annotations

from octavo.sampling import StructuredOutput

from worker_svc.grammar.backend import GrammarBackend, Vocabulary
from worker_svc.grammar.llguidance_backend import LlguidanceBackend


class Backends:
    """The libraries of grammars over one vocabulary.

    Reading a vocabulary takes about a second, in which nothing else of the process runs, so llguidance does
    it at once. xgrammar, which drags in torch, does so when the first constraint comes that only it takes.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Read the vocabulary; raises GrammarError when it cannot be read."""
        self.vocabulary = vocabulary
        self._llguidance = LlguidanceBackend(vocabulary)
        self._xgrammar: GrammarBackend | None = None

    def of(self, structured: StructuredOutput) -> GrammarBackend:
        """Return the one for a constraint; raises GrammarError when it is not there."""
        if structured.grammar is None and structured.structural_tag is None:
            return self._llguidance
        if self._xgrammar is None:
            from worker_svc.grammar.xgrammar_backend import XGrammarBackend  # noqa: PLC0415 - see above

            self._xgrammar = XGrammarBackend(self.vocabulary)
        return self._xgrammar
