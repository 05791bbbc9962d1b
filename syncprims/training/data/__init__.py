"""Data loaders: batches dealt to ranks, in an order that can be resumed."""

from __future__ import annotations

from .loader import Cursor as Cursor
from .loader import OpenLoaders as OpenLoaders
from .loader import PreparedLoader as PreparedLoader
from .loader import prepare_data_loader as prepare_data_loader
from .loader import skip_first_batches as skip_first_batches
