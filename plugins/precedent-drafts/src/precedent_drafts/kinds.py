"""The kinds of drafts that this package brings, each registered under the name of its drafter.

Their contract is `precedent.drafters.registry.DraftKind`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.drafters import DrafterParts
from precedent.errors import ConfigError
from precedent_drafts.block_draft import BlockDraft, BlockSettings, holds_block_draft, load_block_draft
from precedent_drafts.block_drafter import BlockDrafter, BlockModel
from precedent_drafts.dflash import dflash_settings, load_dflash
from precedent_drafts.eagle import EagleHead, EagleSettings, eagle_beside, load_eagle
from precedent_drafts.heads import HeadDrafter, HeadModel, reading_hidden_states
from precedent_drafts.mtp import FAMILIES, mtp_beside
from precedent_drafts.published import DFLASH, EAGLE, PublishedDraft, find_published
from precedent_drafts.trained import holds_draft, load_trained, read_settings, reads_hidden_states

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from precedent.target import TargetModel


class _HeadKind:
    """A kind whose head draws one chain per step."""

    name: str

    def drafter(self, parts: DrafterParts) -> HeadDrafter | None:
        """The drafter of the head that was prepared beside the engine's target."""
        head: HeadModel | None = parts.heads.get(self.name)
        return None if head is None else HeadDrafter(self.name, head)


class TrainedDrafts(_HeadKind):
    """Folders that `precedent train-draft` writes: chains, exits, and drafts that read hidden states."""

    name = "draft-model"

    def recognises(self, source: object, target: PreTrainedConfig | None = None) -> str | None:
        """What a folder holds; of loaded models, only those that read the target's hidden states."""
        if not isinstance(source, str | Path):
            return "a draft that reads its target" if reads_hidden_states(source) else None
        if not holds_draft(source):
            return None
        settings = read_settings(Path(source).expanduser())
        return f"{settings.kind}, trained for {settings.target}; only loading it shows whether that is this model"

    def load(self, source: str | Path, target: PreTrainedModel) -> PreTrainedModel:
        """Load a draft beside its target. Raises ModelLoadError, naming both, if it belongs to another target."""
        return load_trained(Path(source).expanduser(), target)

    def beside(self, target: TargetModel, draft: PreTrainedModel | None) -> HeadModel | None:
        """A conditioned draft, ready to draft; the target keeps hidden states from now on."""
        return None if draft is None else reading_hidden_states(draft, target, feeds_back_normed=True)


class EagleHeads(_HeadKind):
    """EAGLE-3 heads, as their makers publish them."""

    name = "eagle"

    def recognises(self, source: object, target: PreTrainedConfig | None = None) -> str | None:
        """What a folder, a repository of the hub or a loaded model is, if it is a head."""
        if not isinstance(source, str | Path):
            return "an EAGLE-3 head" if isinstance(source, EagleHead) else None
        found = _published(source, target, EAGLE)
        if found is None or target is None:
            return None if found is None else str(found)
        found.layers(target)
        reads = EagleSettings.of(found, target).reads
        return f"{found}; it reads layers {', '.join(map(str, reads))} of the target; {_trained_for(found)}"

    def load(self, source: str | Path, target: PreTrainedModel) -> PreTrainedModel:
        """Load a head beside its target."""
        found = find_published(source)
        assert found is not None, "only what was recognised is loaded"
        return load_eagle(found, target)

    def beside(self, target: TargetModel, draft: Any) -> HeadModel | None:
        """A head, ready to draft; the target keeps the outputs of layers from now on."""
        return None if draft is None else eagle_beside(draft, target)


class BlockDrafts:
    """Block drafts of `precedent train-draft --kind block`, and DFlash drafts, as their makers publish them."""

    name = "block-draft"

    def recognises(self, source: object, target: PreTrainedConfig | None = None) -> str | None:
        """What a folder, a repository of the hub or a loaded model is, if it is a block draft."""
        if not isinstance(source, str | Path):
            return "a block draft" if isinstance(source, BlockDraft) else None
        if holds_block_draft(source):
            trained_for = BlockSettings.read(Path(source).expanduser()).target
            return f"a block draft trained for {trained_for}; loading it shows if it fits"
        found = _published(source, target, DFLASH)
        if found is None or target is None:
            return None if found is None else str(found)
        settings = dflash_settings(found, target, target.vocab_size)
        reads = ", ".join(map(str, settings.reads))
        says = f"{found}; it fills {settings.block_size} positions from layers {reads} of the target"
        return f"{says}; {_trained_for(found)}"

    def load(self, source: str | Path, target: PreTrainedModel) -> PreTrainedModel:
        """Load a block draft beside its target."""
        if holds_block_draft(source):
            return load_block_draft(Path(source).expanduser(), target)
        found = find_published(source)
        assert found is not None, "only what was recognised is loaded"
        return load_dflash(found, target)

    def beside(self, target: TargetModel, draft: Any) -> BlockModel | None:
        """A block draft, ready to draft; the target keeps the outputs of the layers that it reads from now on."""
        return None if draft is None else BlockModel(draft, target)

    def drafter(self, parts: DrafterParts) -> BlockDrafter | None:
        """The drafter of the block draft that was prepared beside the engine's target."""
        model: BlockModel | None = parts.heads.get(self.name)
        return None if model is None else BlockDrafter(model)


class MtpHeads(_HeadKind):
    """MTP heads, which a target's own checkpoint carries: no draft model is given."""

    name = "mtp"

    def recognises(self, source: object, target: PreTrainedConfig | None = None) -> str | None:
        """What the target's own checkpoint carries, beside its text config."""
        if source is not None or target is None or target.model_type not in FAMILIES:
            return None
        return f"checkpoints of {target.model_type} carry a trained MTP head: name mtp among the drafters to use it"

    def load(self, source: str | Path, target: PreTrainedModel) -> PreTrainedModel:
        """Raise ConfigError: a head comes with its target."""
        raise ConfigError(f"mtp drafts with the head in the target's own checkpoint, not with {source}: leave it out")

    def beside(self, target: TargetModel, draft: PreTrainedModel | None) -> HeadModel:
        """The head of the target's checkpoint, ready to draft; the target keeps hidden states from now on."""
        return mtp_beside(target)

    def drafter(self, parts: DrafterParts) -> HeadDrafter:
        """The head's drafter. Raises ConfigError for an engine whose own settings do not name mtp."""
        found = super().drafter(parts)
        if found is None:  # nobody names it by default, so leaving it out would ignore what was asked for
            raise ConfigError(
                "this engine keeps no hidden states, which mtp reads: name mtp among the drafters of its own "
                "speculation settings, EngineOptions(speculation=SpeculationConfig(drafters=(..., 'mtp'))), not only "
                "in a request's"
            )
        return found


TRAINED, EAGLE_HEADS, BLOCKS, MTP_HEADS = TrainedDrafts(), EagleHeads(), BlockDrafts(), MtpHeads()


def _published(source: str | Path, target: PreTrainedConfig | None, kind: str) -> PublishedDraft | None:
    """A published draft of this kind; beside a target's config it is only described, so no weights are fetched."""
    found = find_published(source, weights=target is None)
    return found if found is not None and found.kind == kind else None


def _trained_for(draft: PublishedDraft) -> str:
    return f"trained for {draft.trained_for or 'a target that it does not name'}"
