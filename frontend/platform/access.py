"""Who may see and change what: one place for API and pages."""

from __future__ import annotations

from dataclasses import dataclass

from frontend.openai.auth import Forbidden
from frontend.openai.errors import ApiError
from frontend.openai.principal import Principal, Role
from frontend.platform.read_models import Scope

PLATFORM: frozenset[Role] = frozenset({Role.PLATFORM_ADMIN, Role.AUDITOR})


def may_read_platform(principal: Principal) -> bool:
    """Return whether routes, their settings and every workspace may be read."""
    return principal.role in PLATFORM


def may_change_platform(principal: Principal) -> bool:
    """Return whether settings of routes and weights may be changed."""
    return principal.role is Role.PLATFORM_ADMIN


def require_platform_reader(principal: Principal) -> None:
    """Raises: Forbidden."""
    if not may_read_platform(principal):
        raise Forbidden("only platform admins and auditors may read this")


def require_platform_admin(principal: Principal) -> None:
    """Raises: Forbidden."""
    if not may_change_platform(principal):
        raise Forbidden("only platform admins may change this")


@dataclass(frozen=True, slots=True)
class BatchAccess:
    """What a caller may do with the batches of one workspace.

    Attributes:
        own_key_id: only batches created with this key; None: all of the workspace.
    """

    workspace_id: str
    own_key_id: str | None
    may_cancel: bool

    @property
    def scope(self) -> Scope:
        return "workspace" if self.own_key_id is None else "own"


def batch_access(principal: Principal, workspace_id: str, *, personal: bool) -> BatchAccess:
    """Return what the caller may do with the batches of a workspace.

    Args:
        personal: the workspace belongs to one person: platform roles see totals of those only.

    Raises:
        ApiError: 404 for a workspace the caller has nothing to do with, as for one that does not exist.
        Forbidden: a platform role asks for the batches of somebody's personal workspace.
    """
    foreign = principal.workspace_id != workspace_id
    if foreign and principal.role not in PLATFORM:
        raise no_workspace()
    if foreign and personal:
        raise Forbidden("batches of a personal workspace are shown to its own keys only")
    match principal.role:
        case Role.MEMBER:
            return BatchAccess(workspace_id, principal.key_id, may_cancel=True)
        case Role.AUDITOR:
            return BatchAccess(workspace_id, None, may_cancel=False)
        case _:
            return BatchAccess(workspace_id, None, may_cancel=True)


def no_workspace() -> ApiError:
    """Return the refusal of a workspace that does not exist, or is none of the caller's business."""
    return ApiError(404, "no such workspace", param="workspace")
