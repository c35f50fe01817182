//! Memory nodes of a machine: tiers, of which the first has the CPUs.

use std::fmt;
use std::str::FromStr;

/// The maximum number of nodes of a machine.
const MOST: usize = faultless::MAX_NODES;

/// The shares of memory of the nodes: `1` is one node, `1:1` two nodes of the same size, `1:4` two
/// nodes with four fifths of the memory in the second. All CPUs are in the first node, which has
/// the lowest addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Nodes(Vec<u16>);

/// One node.
impl Default for Nodes {
    fn default() -> Self {
        Self(vec![1])
    }
}

impl Nodes {
    /// Two nodes of the same size.
    pub fn two() -> Self {
        Self(vec![1, 1])
    }

    /// Returns whether there are several nodes.
    pub fn are_several(&self) -> bool {
        self.0.len() > 1
    }

    /// The word of the bare kernel's command line.
    pub(crate) fn word(&self) -> String {
        format!("nodes={self}")
    }

    /// Returns QEMU's arguments for the nodes of a machine with this memory in MiB; firmware
    /// describes the nodes to a stock kernel.
    pub(crate) fn args(&self, memory: u64) -> Vec<String> {
        let sum = |shares: &[u16]| shares.iter().map(|share| u64::from(*share)).sum::<u64>();
        let begin = |node| memory * sum(&self.0[..node]) / sum(&self.0);
        let node = |node: usize| {
            let size = begin(node + 1) - begin(node);
            let cpus = if node == 0 { ",cpus=0" } else { "" };
            [
                "-object".to_owned(),
                format!("memory-backend-ram,id=node{node},size={size}M"),
                "-numa".to_owned(),
                format!("node,nodeid={node}{cpus},memdev=node{node}"),
            ]
        };
        (0..self.0.len()).flat_map(node).collect()
    }
}

impl fmt::Display for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shares: Vec<_> = self.0.iter().map(u16::to_string).collect();
        f.write_str(&shares.join(":"))
    }
}

/// The text does not describe [`Nodes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the shares of at most {MOST} nodes, each from 1 to 65535: 1:1 for two nodes of the same size, 1:4"
)]
pub struct NoNodes;

impl FromStr for Nodes {
    type Err = NoNodes;

    fn from_str(text: &str) -> Result<Self, NoNodes> {
        let share = |text: &str| text.parse().ok().filter(|share| *share > 0);
        let shares: Option<Vec<_>> = text.split(':').map(share).collect();
        // `2` would be one node.
        let known = |shares: &Vec<_>| shares.len() <= MOST && (shares.len() > 1 || shares[0] == 1);
        shares.filter(known).map(Self).ok_or(NoNodes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_read_or_refused() {
        for text in ["1", "1:1", "10:23", "65535:1", "1:1:1:1:1:1:1:1"] {
            assert_eq!(text.parse::<Nodes>().map(|nodes| nodes.to_string()), Ok(text.into()));
        }
        for text in
            ["", "0", "2", "1:0", "1:", ":", "1:-1", "1:65536", "1.5:1", "1,1", "1:1:1:1:1:1:1:1:1"]
        {
            assert_eq!(text.parse::<Nodes>(), Err(NoNodes), "{text}");
        }
        assert_eq!("1".parse(), Ok(Nodes::default()));
        assert_eq!("1:1".parse(), Ok(Nodes::two()));
    }

    #[test]
    fn nodes_of_a_stock_kernel_have_all_memory() {
        let args = "1:2".parse::<Nodes>().expect("shares").args(1000);
        let expected = [
            "-object",
            "memory-backend-ram,id=node0,size=333M",
            "-numa",
            "node,nodeid=0,cpus=0,memdev=node0",
            "-object",
            "memory-backend-ram,id=node1,size=667M",
            "-numa",
            "node,nodeid=1,memdev=node1",
        ];
        assert_eq!(args, expected);
    }
}
