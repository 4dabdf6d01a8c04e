"""What each policy allows: a few lines over the same parts, so that a difference in results is a difference in
policy."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engines.pdd.config import EngineSpec, InstanceSpec
from traces.errors import UserError


@dataclass(frozen=True, slots=True)
class Policy:
    """`has_relay`: low-hit requests may go through RLD. `is_one_site`: P and MD stand together, no line between them.
    `is_colocated`: every instance prefills and decodes."""

    name: str
    has_relay: bool = False
    is_one_site: bool = False
    is_colocated: bool = False

    def arrange(self, instances: tuple[InstanceSpec, ...]) -> tuple[InstanceSpec, ...]:
        """The cluster's instances as this policy uses them: same chips, other places and roles."""
        if not self.has_relay:
            instances = tuple(spec for spec in instances if spec.role != "RLD")
        if self.is_one_site or self.is_colocated:
            site = instances[0].site
            instances = tuple(replace(spec, site=site) for spec in instances)
        if self.is_colocated:
            instances = tuple(replace(spec, role="MIXED") for spec in instances)
        return instances


POLICIES = {
    policy.name: policy
    for policy in (
        Policy("colocated", is_colocated=True),
        Policy("pd", is_one_site=True),
        Policy("cross_pd"),
        Policy("pdd", has_relay=True),
    )
}


def arranged(spec: EngineSpec) -> tuple[Policy, EngineSpec]:
    """The policy of `spec` and `spec` with its instances arranged; raises UserError where a role is missing."""
    policy = POLICIES.get(spec.policy)
    if policy is None:
        raise UserError(f"engine.policy: unknown policy {spec.policy!r}; choose one of {', '.join(POLICIES)}")
    instances = policy.arrange(spec.instances)
    needed = {"MIXED"} if policy.is_colocated else {"P", "MD"} | ({"RLD"} if policy.has_relay else set())
    missing = needed - {instance.role for instance in instances}
    if missing:
        raise UserError(
            f"cluster.instances: policy {policy.name} needs an instance of role {', '.join(sorted(missing))}"
        )
    return policy, replace(spec, instances=instances)
