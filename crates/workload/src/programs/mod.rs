//! The benchmark programs, one a file.

mod brk1;
mod discard;
mod ebizzy;
mod forks;
mod llm;
mod mmap1;
mod page_fault1;
mod page_fault1_churn;
mod page_fault_file;
mod page_fault_read;
mod pft;
mod random;
mod rounds;
mod small_allocs;
mod text;
mod tiered;
mod touch;
mod vma;
mod xsbench;

pub use brk1::Brk1;
pub use discard::Discard;
pub use ebizzy::Ebizzy;
pub use forks::Forks;
pub use llm::Llm;
pub use mmap1::Mmap1;
pub use page_fault_file::{PageFault2, PageFault3, PageFaultFile};
pub use page_fault_read::PageFaultRead;
pub use page_fault1::PageFault1;
pub use page_fault1_churn::PageFault1Churn;
pub use pft::Pft;
pub use small_allocs::SmallAllocs;
pub use text::Text;
pub use vma::{Vma, VmaFault, VmaMmap, VmaMmapTouch, VmaUnmap, VmaUnmapUntouched};
pub use xsbench::XsBench;
