"""Training in a browser: a run's plans and weights as files that a page replays.

The page is in ``page/``, within the package, so that what is installed is whole.
"""

from qlora_wgpu.web.site import MANIFEST, Site, SiteOptions, write_site

__all__ = ["MANIFEST", "Site", "SiteOptions", "write_site"]
