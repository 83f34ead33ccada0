"""The wire contract: every JSON message between coordinator, workers and clients.

Names and fields follow the HTTP API of SGLang 0.5.23's own servers where SGLang has them, so that
one code path drives every engine; EPD's additions are optional fields beside them.
"""

from epd.wire.chat import (
    ChatRequest,
    ContinueFrom,
    ImagePart,
    Message,
    TextPart,
    parse_chat_request,
)
from epd.wire.handoff import (
    EncodeRequest,
    EncodeResponse,
    KVLayout,
    MetadataRequest,
    MetadataResponse,
    ReceiverRequest,
    RoomDescriptor,
    RoomSendRequest,
    SendRequest,
    SendResponse,
    bare_hash,
    part_id,
    rid_of,
    wire_hash,
)
from epd.wire.parsing import dump_json, load_json, parse
from epd.wire.workers import (
    AbortRequest,
    LeaseGrant,
    Load,
    ModelCard,
    Span,
    WorkerReport,
)

__all__ = [
    "AbortRequest",
    "ChatRequest",
    "ContinueFrom",
    "EncodeRequest",
    "EncodeResponse",
    "ImagePart",
    "KVLayout",
    "LeaseGrant",
    "Load",
    "Message",
    "MetadataRequest",
    "MetadataResponse",
    "ModelCard",
    "ReceiverRequest",
    "RoomDescriptor",
    "RoomSendRequest",
    "SendRequest",
    "SendResponse",
    "Span",
    "TextPart",
    "WorkerReport",
    "bare_hash",
    "dump_json",
    "load_json",
    "parse",
    "parse_chat_request",
    "part_id",
    "rid_of",
    "wire_hash",
]
