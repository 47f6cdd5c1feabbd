"""Training in a browser: a run's plans and weights as files that the page in ``page/`` replays."""

from qlora_wgpu.web.site import MANIFEST, Site, SiteOptions, write_site

__all__ = ["MANIFEST", "Site", "SiteOptions", "write_site"]
