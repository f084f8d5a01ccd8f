"""The public names, and where each is; :mod:`infinity` reads this file."""

from infinity import optim as optim
from infinity.api.export import export as export
from infinity.api.export import save_lora as save_lora
from infinity.api.export import stream_weights as stream_weights
from infinity.api.init import Init as Init
from infinity.api.init import close as close
from infinity.api.init import ema as ema
from infinity.api.init import from_pretrained as from_pretrained
from infinity.api.init import gathered as gathered
from infinity.api.init import layer_schedule as layer_schedule
from infinity.api.init import no_sync as no_sync
from infinity.api.init import on_gradient as on_gradient
from infinity.api.init import quantize as quantize
from infinity.api.init import resume as resume
from infinity.api.init import state_dict as state_dict
from infinity.api.lora import adapter as adapter
from infinity.api.lora import add_lora as add_lora
from infinity.api.lora import lora_groups as lora_groups
from infinity.api.offload_activations import offload_activations as offload_activations
from infinity.api.optimizer import AdamW as AdamW
from infinity.api.portable import load_checkpoint as load_checkpoint
from infinity.api.portable import save_checkpoint as save_checkpoint
from infinity.core.errors import BudgetError as BudgetError
from infinity.core.errors import CheckpointError as CheckpointError
from infinity.core.errors import DiskError as DiskError
from infinity.core.errors import DivergenceError as DivergenceError
from infinity.core.errors import InfinityError as InfinityError
from infinity.core.errors import PeerError as PeerError
from infinity.core.errors import RecipeError as RecipeError
from infinity.core.errors import StateError as StateError
from infinity.engine.sequence import SequenceRanks as SequenceRanks
from infinity.integrations.accelerate import Accelerator as Accelerator
from infinity.integrations.lightning import LightningStrategy as LightningStrategy
from infinity.integrations.trainer import trainer as trainer
from infinity.recipes.loading import load_recipe as load_recipe
from infinity.recipes.recipe import Recipe as Recipe

__version__: str
