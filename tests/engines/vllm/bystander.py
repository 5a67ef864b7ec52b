"""A connector beside ours, as Nixl is: it may claim a prompt's tokens, or ask for patience."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)


@dataclass
class Claims(KVConnectorMetadata):
    """Requests whose blocks the bystander fills: id to (blocks, tokens before, tokens)."""

    loads: dict = field(default_factory=dict)


class Bystander(KVConnectorBase_V1, SupportsHMA):
    """Claims as many tokens as its extra configuration says, once a request."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.claim = extra.get("claim", 0)
        self.patience = extra.get("patience", 0)
        self.claimed = set()
        self.loads = {}

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if self.patience:
            self.patience -= 1
            return None, False
        tokens = min(self.claim, request.num_tokens // 16 * 16) - num_computed_tokens
        if tokens <= 0 or request.request_id in self.claimed:
            return 0, False
        return tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.claimed.add(request.request_id)
            count = self.claim // 16
            self.loads[request.request_id] = (
                list(blocks.get_block_ids()[0][:count]),
                list(request.all_token_ids[: self.claim]),
            )

    def build_connector_meta(self, scheduler_output):
        loads, self.loads = self.loads, {}
        return Claims(loads)

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    def start_load_kv(self, forward_context, **kwargs):
        raise NotImplementedError

    def wait_for_layer_load(self, layer_name):
        raise NotImplementedError

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        raise NotImplementedError

    def wait_for_save(self):
        raise NotImplementedError
