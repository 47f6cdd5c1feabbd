// What attention's register kernels read: heads in units of four elements where head_dim allows
// (HEAD_UNIT4), else two.
//#include common/head_value.wgsl
//#if HEAD_UNIT4
//#input 1 q: 4
//#input 2 k: 4
//#input 3 v: 4
//#if dout
//#input 5 dout: 4
//#endif
//#else
//#input 1 q: 2
//#input 2 k: 2
//#input 3 v: 2
//#if dout
//#input 5 dout: 2
//#endif
//#endif
