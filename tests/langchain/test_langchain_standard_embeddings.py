"""LangChain's own standard tests of embeddings."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_tests.integration_tests import EmbeddingsIntegrationTests
from langchain_tests.unit_tests import EmbeddingsUnitTests

from precedent.langchain import PrecedentEmbeddings
from precedent_testing.embedders import HashEmbedder

pytestmark = pytest.mark.filterwarnings("default")  # the suites use what LangChain itself has deprecated


class TestEmbeddingsUnit(EmbeddingsUnitTests):
    @property
    def embeddings_class(self) -> type[PrecedentEmbeddings]:
        return PrecedentEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": HashEmbedder()}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"PRECEDENT_EMBEDDER": "folder/name"}, {}, {"name": "folder/name"}


class TestEmbeddingsIntegration(EmbeddingsIntegrationTests):
    @property
    def embeddings_class(self) -> type[PrecedentEmbeddings]:
        return PrecedentEmbeddings

    @property
    def embedding_model_params(self) -> dict[str, Any]:
        return {"model": HashEmbedder()}
